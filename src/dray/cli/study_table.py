"""The runs of a study as text."""

from __future__ import annotations

from collections.abc import Sequence

from dray.contract.control_characters import cell
from dray.contract.findings import counted
from dray.runs.study import PARITY, Parity, Row, Study

_BAR = 20


def table(study: Study, rows: Sequence[Row]) -> list[str]:
    """A line for each run; for a scaling study also the efficiency as bars."""
    scaling = study.kind != "sweep"
    titles = ["ranks" if scaling else "settings", "state", "tokens/s", *(["speedup", "efficiency"] * scaling)]
    titles += ["step s", "train s", "loss", "eval loss", "run"]
    lines = [titles]
    for row in rows:
        own = [_figure(row.speedup, ".2f"), _figure(row.efficiency, ".0%")] if scaling else []
        lines.append(
            [
                str(row.ranks) if scaling else " ".join(row.settings),
                row.state, _figure(row.tokens_per_s, ",.0f"), *own, _figure(row.step_s, ".3f"),
                _figure(row.seconds, ",.1f"), _figure(row.loss, ".5f"), _figure(row.eval_loss, ".5f"), row.run,
            ]
        )  # fmt: skip
    left = {"settings", "state", "run"}
    return columns(lines, [title in left for title in titles]) + (_plot(rows) if scaling else [])


def columns(lines: Sequence[Sequence[str]], left: Sequence[bool]) -> list[str]:
    """The lines of a table; `left` says which columns are aligned to the left."""
    lines = [[*map(cell, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            one.ljust(width) if is_left else one.rjust(width)
            for one, width, is_left in zip(line, widths, left, strict=True)
        ]
        for line in lines
    ]
    return ["  ".join(line).rstrip() for line in aligned]


def _plot(rows: Sequence[Row]) -> list[str]:
    """Efficiency by ranks, as bars; a full one is 100 %."""
    drawn = [(row.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    width = max((len(str(ranks)) for ranks, _ in drawn), default=0)
    bars = [f"{ranks:>{width}} {'#' * round(min(share, 1.5) * _BAR):<{_BAR}}| {share:.0%}" for ranks, share in drawn]
    return ["", "efficiency", *bars] if len(bars) > 1 else []


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def parity(study: Study, found: Parity) -> list[str]:
    """Whether losses agree that should be equal."""
    if study.kind != "strong":
        return []
    not_finite = [f"losses of {counted(found.not_finite, 'step')} are not finite"] if found.not_finite else []
    if found.broken:
        wanted = f"wanted: at most {PARITY:.0e}, since the recipe is fp32 and the global batch is the same"
        return ["", "LOSS PARITY IS BROKEN", *(f"  {line}" for line in [*found.broken, *not_finite, wanted])]
    if not found.steps:
        return ["", "losses: not compared yet; no two runs have logged the same step"]
    note = "they agree" if found.checked else "not checked: not fp32"
    return ["", f"losses: {found.largest:.1e} apart at most, step by step; {note}", *not_finite]
