"""The table of `dray tune`, and its best settings as a recipe."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from dray import __version__
from dray.cli import study_table
from dray.contract import exit_codes, files
from dray.contract.findings import ConfigError, counted
from dray.runs import tuned
from dray.runs.measured import DIFFER, DONE, Row
from dray.runs.tune import none_runs
from dray.runs.tuned import Tuning

_SHOWN = 12
_OWN = "the recipe's own"
_TITLES = ("", "setting", "state", "tokens/s", "+-", "step s", "memory GB", "loss", "run")
_LEFT = ("", "setting", "state", "run")


def line(number: int, tuning: Tuning, row: Row) -> str:
    """The line of a candidate that has ended."""
    shown = f"{_speed(row)}" if row.state == DONE else f"{row.state}: {row.why}"
    return f"{number:>3}  {setting(tuning, row)}: {shown}"


def setting(tuning: Tuning, row: Row) -> str:
    """The settings of a row that differ from the recipe's."""
    found = tuned.candidate(row.values).differences(tuned.candidate(tuning.start))
    return " ".join(f"{key}={_value(value)}" for key, value in found) or _OWN


def lines(tuning: Tuning) -> list[str]:
    """The table, the fastest first; below it, why other candidates have no figures."""
    best, table = tuning.best, [list(_TITLES)]
    begun = [row for row in tuning.rows if row.run]
    for row in sorted(begun, key=lambda row: -(row.tokens_per_s or 0.0) if row.state == DONE else 1.0):
        done = row.state == DONE
        table.append(
            [
                "*" if row is best else "", setting(tuning, row), row.state,
                f"{row.tokens_per_s:,.0f}" if done else "", f"{row.spread:.0%}" if done else "",
                f"{row.step_s:.4g}" if done else "", f"{row.memory_gb:.2f}" if done and row.memory_gb else "",
                f"{row.losses[-1]:.5f}" if row.losses else "", row.run,
            ]
        )  # fmt: skip
    why: dict[str, list[str]] = {}
    for row in tuning.rows:
        if row.state != DONE:
            why.setdefault(f"{row.state}: {row.why}", []).append(setting(tuning, row))
    shown = study_table.columns(table, [title in _LEFT for title in _TITLES]) if begun else []
    for reason, settings in why.items():
        shown += ["", reason, *(f"  {one}" for one in settings[:_SHOWN])]
        shown += [f"  and {len(settings) - _SHOWN} more"] * (len(settings) > _SHOWN)
    return shown


def summary(tuning: Tuning) -> list[str]:
    """The number of runs, and the best settings."""
    begun, best = sum(bool(row.run) for row in tuning.rows), tuning.best
    left = f", {counted(len(tuning.rows) - begun, 'candidate')} left out" if len(tuning.rows) > begun else ""
    how = "all of them" if tuning.every else "the search"
    ended = "" if tuning.complete else "; it has not ended"
    found = [f"{counted(begun, 'run')}{left}, of {counted(tuning.grid, 'candidate')} ({how}{ended})"]
    if refused := [setting(tuning, row) for row in tuning.rows if row.state == DIFFER]:
        found.append(f"REFUSED, since the losses differ: {'; '.join(refused)}")
    if best is None:
        return found
    found.append(f"best: {setting(tuning, best)}: {_speed(best)}")
    own = next((row for row in tuning.rows if row.values == tuning.start), None)
    if own and own is not best and own.tokens_per_s and best.tokens_per_s and own.state == DONE:
        found.append(f"      {best.tokens_per_s / own.tokens_per_s:.2f} times {_OWN}: {_speed(own)}")
    return found


def show(folder: Path, tuning: Tuning, *, as_json: bool = False) -> None:
    """Print the table and the summary."""
    if as_json:
        best = tuning.best
        print(json.dumps({"study": str(folder), **tuning.model_dump(), "best": best and best.model_dump()}, indent=1))
        return
    print("\n".join(["", *lines(tuning), "", *summary(tuning), "", f"again: dray tune --table {folder}"]))


def write(folder: Path, tuning: Tuning, out: Path) -> None:
    """Write the best settings as a recipe. If that fails they are printed, since they took long to find."""
    best = tuning.best
    if best is None:
        raise none_runs(tuning, folder)
    head = [
        f"{tuning.recipe.get('name')}, tuned by dray {__version__} on {time.strftime('%Y-%m-%d', time.gmtime())}: "
        f"{tuning.where}",
        f"tokens/s: median of {counted(tuning.steps, 'step')} after {tuning.warm_up} of warm-up; half lie within +-",
        *summary(tuning), "", *lines(tuning),
    ]  # fmt: skip
    for path, text in tuned.as_files(tuning, best, out, head).items():
        if path != out and os.path.lexists(path) and path.read_text(encoding="utf-8", errors="replace") != text:
            raise ConfigError(
                "a file that the recipe names exists already and differs", where=path, fix="choose another --out",
            )  # fmt: skip
        try:
            files.write_atomic(path, text)
        except OSError as refused:
            print(text)
            raise ConfigError(
                "the best settings could not be written; they are printed above", where=path, found=refused.strerror,
                fix=f"dray tune --table {folder} --out FILE", code=exit_codes.FAILED,
            ) from refused  # fmt: skip
    print(f"{out}: dray run {out}")


def require_some(folder: Path, tuning: Tuning) -> None:
    """Refuse a table without a best row."""
    if tuning.best is None:
        raise none_runs(tuning, folder)


def _speed(row: Row) -> str:
    memory = f", {row.memory_gb:.2f} GB" if row.memory_gb else ""
    return f"{row.tokens_per_s:,.0f} tokens/s +- {row.spread:.0%}{memory}"


def _value(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
