"""The table of `dray study` as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dray.contract.control_characters import cell, printable
from dray.contract.findings import counted
from dray.runs import status, tune
from dray.runs.study import Row, Study

_LEFT = ("", "settings", "state", "run")
_WAITING = (status.QUEUED, status.RUNNING, status.NO_RESULT, "no run")


def text(study: Study, rows: Sequence[Row]) -> list[str]:
    """A line for each run; below, why some failed, and whether losses agree that should be equal."""
    scaling, tuning = study.kind in ("strong", "weak"), study.kind == "tune"
    best = tune.best(rows) if tuning else None
    lines = []
    for row in sorted(rows, key=lambda row: -(row.tokens_per_s or 0.0)) if tuning else rows:
        line = {"": "*" if row is best else ""} if tuning else {}
        line |= {"ranks": str(row.ranks)} if scaling else {"settings": str(row)}
        line |= {"state": "losses differ" if tuning and row.apart else row.state}
        line["tokens/s"] = _figure(row.tokens_per_s, ",.0f")
        if scaling:
            line |= {"speedup": _figure(row.speedup, ".2f"), "efficiency": _figure(row.efficiency, ".0%")}
        if tuning:
            line |= {"+-": f"{row.spread:.0%}", "memory GB": _figure(row.memory_gb, ".2f")}
        line |= {"step s": _figure(row.step_s, ".4g"), "train s": _figure(row.seconds, ",.1f")}
        line |= {"loss": _figure(row.loss, ".5f"), "eval loss": _figure(row.eval_loss, ".5f"), "run": row.run}
        lines.append(line)
    shown = _columns([[*lines[0]], *([*line.values()] for line in lines)]) if lines else []
    told = [printable(f"{row}: {row.apart or row.why}") for row in rows if row.apart or row.why]
    if study.kind in ("strong", "tune"):
        told = [*_losses(study, rows), *told]
    if best:
        faster = (best.tokens_per_s or 0.0) / (rows[0].tokens_per_s or math.inf)
        told.append(f"best: {best}: {tune.speed(best)}, {faster:.2f} times the recipe's own")
    return [*shown, "", *told] if told else shown


def again(folder: str, rows: Sequence[Row]) -> str:
    """How many runs have not ended, and the command that shows the table later."""
    waiting = sum(row.state in _WAITING for row in rows)
    left = f"{counted(waiting, 'run')} of {len(rows)} not ended; " if waiting else ""
    return f"{left}again: dray study show {folder}"


def _columns(lines: Sequence[Sequence[str]]) -> list[str]:
    shown = [""] * len(lines)
    for column in zip(*lines, strict=True):
        cells = [*map(cell, column)]
        width = max(map(len, cells))
        for number, text in enumerate(cells):
            shown[number] += (text.ljust(width) if column[0] in _LEFT else text.rjust(width)) + "  "
    return [line.rstrip() for line in shown]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _losses(study: Study, rows: Sequence[Row]) -> list[str]:
    """Whether losses agree that should be equal."""
    if any(row.apart for row in rows):
        return [f"LOSSES DIFFER by more than {study.tolerance:.0e} ({study.reason}):"]
    differences = [row.difference for row in rows if row.difference is not None]
    if not differences:
        return ["losses: not compared yet; no two runs have logged the same step"]
    checked = study.kind == "tune" or all(row.is_fp32 for row in rows if row.losses)
    largest = "not all finite" if math.inf in differences else f"{max(differences):.1e} apart at most, step by step"
    return [f"losses: {largest}; {'they agree' if checked else 'not checked: not fp32'}"]
