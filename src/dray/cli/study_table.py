"""The tables of `dray study` as text."""

from __future__ import annotations

from collections.abc import Sequence

from dray.contract.control_characters import cell
from dray.contract.findings import counted
from dray.runs import study, tune
from dray.runs.study import PARITY, Parity, Study
from dray.runs.tune import DIFFER, DONE, Tuning

_BAR = 20
_OWN = "the recipe's own"


def columns(lines: Sequence[Sequence[str]], left: Sequence[str]) -> list[str]:
    """The lines of a table; the columns with these titles are aligned to the left."""
    shown = [""] * len(lines)
    for column in zip(*lines, strict=True):
        cells = [*map(cell, column)]
        width = max(map(len, cells))
        for number, text in enumerate(cells):
            shown[number] += (text.ljust(width) if column[0] in left else text.rjust(width)) + "  "
    return [line.rstrip() for line in shown]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def table(found: Study, rows: Sequence[study.Row]) -> list[str]:
    """A line for each run; for a scaling study also the efficiency as bars."""
    scaling = found.kind != "sweep"
    titles = ["ranks" if scaling else "settings", "state", "tokens/s", *(["speedup", "efficiency"] if scaling else [])]
    lines, bars = [[*titles, "step s", "train s", "loss", "eval loss", "run"]], list[str]()
    for row in rows:
        line = [str(row.ranks) if scaling else " ".join(row.settings), row.state, _figure(row.tokens_per_s, ",.0f")]
        if scaling:
            line += [_figure(row.speedup, ".2f"), _figure(row.efficiency, ".0%")]
        line += [_figure(row.step_s, ".3f"), _figure(row.seconds, ",.1f")]
        lines.append([*line, _figure(row.loss, ".5f"), _figure(row.eval_loss, ".5f"), row.run])
        if row.efficiency is not None:
            bar = "#" * round(min(row.efficiency, 1.5) * _BAR)
            bars.append(f"{row.ranks:>{len(str(rows[-1].ranks))}} {bar:<{_BAR}}| {row.efficiency:.0%}")
    shown = columns(lines, ["settings", "state", "run"])
    return [*shown, "", "efficiency", *bars] if len(bars) > 1 else shown


def parity(found: Study, told: Parity) -> list[str]:
    """Whether losses agree that should be equal."""
    if found.kind != "strong":
        return []
    not_finite = [f"losses of {counted(told.not_finite, 'step')} are not finite"] if told.not_finite else []
    if told.broken:
        wanted = f"wanted: at most {PARITY:.0e}, since the recipe is fp32 and the global batch is the same"
        return ["", "LOSS PARITY IS BROKEN", *(f"  {line}" for line in [*told.broken, *not_finite, wanted])]
    if not told.steps:
        return ["", "losses: not compared yet; no two runs have logged the same step"]
    note = "they agree" if told.checked else "not checked: not fp32"
    return ["", f"losses: {told.largest:.1e} apart at most, step by step; {note}", *not_finite]


def tune_line(tuning: Tuning, row: tune.Row) -> str:
    """The line of a candidate that has ended."""
    told = _speed(row) if row.state == DONE else f"{row.state}: {row.why}"
    return f"{len(tuning.rows):>3}  {_setting(tuning, row)}: {told}"


def tune_table(tuning: Tuning) -> list[str]:
    """The candidates, the fastest first; below, why others have no figures."""
    best, lines = tuning.best, [["", "setting", "state", "tokens/s", "+-", "step s", "memory GB", "loss", "run"]]
    for row in sorted(tuning.begun, key=lambda row: -(row.tokens_per_s or 0.0)):
        figures = ["", "", "", ""]
        if row.state == DONE:
            figures = [_figure(row.tokens_per_s, ",.0f"), f"{row.spread:.0%}", _figure(row.step_s, ".4g")]
            figures.append(_figure(row.memory_gb, ".2f"))
        loss = _figure(row.losses[-1], ".5f") if row.losses else ""
        lines.append(["*" if row is best else "", _setting(tuning, row), row.state, *figures, loss, row.run])
    why: dict[str, list[str]] = {}
    for row in tuning.rows:
        if row.state != DONE:
            why.setdefault(f"{row.state}: {row.why}", []).append(f"  {_setting(tuning, row)}")
    shown = columns(lines, ["", "setting", "state", "run"]) if tuning.begun else []
    for reason, settings in why.items():
        shown += ["", reason, *settings]
    return shown


def tune_summary(tuning: Tuning) -> list[str]:
    """The number of runs, and the best settings."""
    begun, best = len(tuning.begun), tuning.best
    left = f", {counted(len(tuning.rows) - begun, 'candidate')} left out" if len(tuning.rows) > begun else ""
    how = ("all of them" if tuning.every else "the search") + ("" if tuning.complete else "; it has not ended")
    found = [f"{counted(begun, 'run')}{left}, of {counted(tuning.grid, 'candidate')} ({how})"]
    if refused := [_setting(tuning, row) for row in tuning.rows if row.state == DIFFER]:
        found.append(f"REFUSED, since the losses differ: {'; '.join(refused)}")
    if best is None:
        return found
    found.append(f"best: {_setting(tuning, best)}: {_speed(best)}")
    own = next((row for row in tuning.rows if row.values == tuning.start and row.figure), None)
    if own and own is not best:
        faster = (best.tokens_per_s or 0.0) / (own.tokens_per_s or 1.0)
        found.append(f"      {faster:.2f} times {_OWN}: {_speed(own)}")
    return found


def _setting(tuning: Tuning, row: tune.Row) -> str:
    """The settings of a row that differ from the recipe's."""
    changes = row.candidate.differences(tuning.first)
    return " ".join(f"{key}={str(value).lower()}" for key, value in changes) or _OWN


def _speed(row: tune.Row) -> str:
    memory = f", {row.memory_gb:.2f} GB" if row.memory_gb else ""
    return f"{row.tokens_per_s:,.0f} tokens/s +- {row.spread:.0%}{memory}"
