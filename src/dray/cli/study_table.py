"""The table of `dray study` as text."""

from __future__ import annotations

from collections.abc import Sequence

from dray.contract.control_characters import cell, printable
from dray.runs.study import Row, Study, speed

# Of each column its name, the attribute of the row, and how both are written: < is on the left.
_COLUMNS = {
    "ranks": ("ranks", ">"),
    "settings": ("label", "<"),
    "state": ("state", "<"),
    "tokens/s": ("tokens_per_s", ">,.0f"),
    "+-": ("spread", ">.0%"),
    "speedup": ("speedup", ">.2f"),
    "efficiency": ("efficiency", ">.0%"),
    "memory GB": ("memory_gb", ">.2f"),
    "loss": ("loss", ">.5f"),
    "eval loss": ("eval_loss", ">.5f"),
    "run": ("run", "<"),
}
_SCALE = ("ranks", "state", "tokens/s", "speedup", "efficiency", "loss", "eval loss", "run")
_SHOWN = {
    "strong": _SCALE,
    "weak": _SCALE,
    "sweep": ("settings", "state", "tokens/s", "loss", "eval loss", "run"),
    "tune": ("settings", "state", "tokens/s", "+-", "memory GB", "loss", "run"),
}


def text(study: Study, rows: Sequence[Row], best: Row | None) -> list[str]:
    """A line for each run; below, why some failed, and whether losses agree that should be equal."""
    shown = sorted(rows, key=lambda row: -(row.tokens_per_s or 0.0)) if study.kind == "tune" else rows
    lines = [""] * (len(rows) + 1)
    for name in _SHOWN[study.kind]:
        attribute, form = _COLUMNS[name]
        values = [getattr(row, attribute) for row in shown]
        cells = [name, *("" if value is None else cell(f"{value:{form[1:]}}") for value in values)]
        width = max(map(len, cells))
        lines = [f"{line}{text:{form[0]}{width}}  " for line, text in zip(lines, cells, strict=True)]
    notes = [_losses(study, rows)] if study.tolerance else []
    notes += [printable(f"{row.label}: {row.apart or row.why}") for row in rows if row.apart or row.why]
    if best:
        notes.append(f"best: {best.label}: {speed(best)}")
    return [*map(str.rstrip, lines), *([""] if notes else []), *notes]


def _losses(study: Study, rows: Sequence[Row]) -> str:
    """Whether losses agree that should be equal."""
    if any(row.apart for row in rows):
        return f"LOSSES DIFFER by more than {study.tolerance:.0e} ({study.reason}):"
    differences = [row.difference for row in rows if row.difference is not None]
    if not differences:
        return "losses: not compared yet; no two runs have logged the same step"
    return f"losses: {max(differences):.1e} apart at most, step by step; they agree"
