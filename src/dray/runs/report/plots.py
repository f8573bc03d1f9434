"""Curves of metrics, each with a description in words."""

from __future__ import annotations

from collections.abc import Sequence

from dray.runs.metrics import number
from dray.runs.report.curves import reduced
from dray.runs.report.data import Run
from dray.runs.report.document import MISSING, Item, Lines, Point, Series, Text
from dray.runs.report.numbers import figure


def curve(runs: Sequence[Run], column: str, title: str, label: str, *, from_zero: bool = False) -> Item:
    series = tuple(Series(run.name, reduced(points)) for run in runs if (points := run.trace.points(column)))
    if not series:
        return Text(f"{title}: {MISSING}. metrics.jsonl has no steps.")
    return Lines(title, "step", label, series, _marks(runs), from_zero, told(series, title.lower()))


def told(series: Sequence[Series], what: str) -> str:
    """A description of the curves in words."""
    named = [f" of {one.name}" if len(series) > 1 else "" for one in series]
    start = f"{what[:1].upper()}{what[1:]}"
    return " ".join(f"{start}{of}: {_course(one.points)}." for of, one in zip(named, series, strict=True))


def _course(points: Sequence[Point]) -> str:
    (first, begin), (last_x, end) = points[0], points[-1]
    least, most = (choose(points, key=lambda point: point[1]) for choose in (min, max))
    return (
        f"{figure(begin, 4)} at step {first:,.0f}, {figure(end, 4)} at step {last_x:,.0f}, minimum "
        f"{figure(least[1], 4)} at step {least[0]:,.0f}, maximum {figure(most[1], 4)} at step {most[0]:,.0f}"
    )


def _marks(runs: Sequence[Run]) -> tuple[tuple[float, str], ...]:
    """Where a run resumed, and where its loss jumped."""
    found = []
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        for start in run.trace.of("start"):
            if step := number(start, "first_step"):
                found.append((step, f"{name}attempt {start['attempt']} resumed at step {step:,.0f}"))
        for jump in run.trace.of("divergence"):
            if (step := number(jump, "first_step")) is not None:
                found.append((step, f"{name}loss {str(jump.get('kind'))[:40]} at step {step:,.0f}"))
    return tuple(found[:60])
