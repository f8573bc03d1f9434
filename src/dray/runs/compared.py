"""Compare two runs: their differences, and the effect on losses and speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from dray.contract.control_characters import printable
from dray.runs import capsule
from dray.runs import diff as differ
from dray.runs.diff import Difference
from dray.runs.effect import Curve, Effect, effect, losses_text
from dray.runs.store import RunPaths, attempts, newest_attempt
from dray.runs.write import read

_WIDE = 48
_SHOWN = 40


class Compared(BaseModel):
    """The comparison of two runs."""

    a: str
    b: str
    differences: list[Difference]
    effect: Effect
    notes: list[str] = []


def compare(a: Path, b: Path) -> Compared:
    """Compare two runs, or single attempts if their folders are given."""
    sides = [newest_attempt(folder) for folder in (a, b)]
    read_ = [(plan := read(paths), capsule.of(paths, plan)) for paths in sides]
    every = [of_run(folder, paths) for folder, paths in zip((a, b), sides, strict=True)]
    none = [f"{paths.run.name} has no capsule: its versions and nodes are unknown" for paths in sides
            if not os.path.lexists(paths.capsule)]  # fmt: skip
    found = effect(*every)
    return Compared(
        a=sides[0].run.name, b=sides[1].run.name, differences=differ.differences(*read_), effect=found,
        notes=[*none, *found.a.warnings, *found.b.warnings],
    )  # fmt: skip


def of_run(folder: Path, newest: RunPaths) -> list[RunPaths]:
    """All attempts of a run, or the one attempt that was named."""
    if folder.absolute() == newest.folder:
        return [newest]
    return [RunPaths(newest.run, number) for number in attempts(newest.run)]


def text(found: Compared) -> Iterator[str]:
    """The differences, most important first; then losses, times and speed."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    shown = found.differences[:_SHOWN]
    yield "dray found no differences" if not shown else "differences, most important first:"
    kinds = max((len(one.kind) for one in shown), default=0)
    names = max((len(one.name) for one in shown), default=0)
    for one in shown:
        yield f"  {one.kind:<{kinds}}  {one.name:<{names}}  {_short(one.a)} -> {_short(one.b)}"
    if more := len(found.differences) - len(shown):
        yield f"  and {more} more (--json lists all)"
    yield from (f"note: {note}" for note in found.notes)
    yield from losses_text(found.effect.parting)
    yield from _times(found.effect.a, found.effect.b)


def _times(a: Curve, b: Curve) -> Iterator[str]:
    rows = (
        ("step, median", a.median_s, b.median_s, "s"),
        ("step, p95", a.p95_s, b.p95_s, "s"),
        ("speed", a.tokens_per_s, b.tokens_per_s, "tokens/s"),
        ("start-up", a.start_s, b.start_s, "s"),
    )
    for name, ours, theirs, unit in rows:
        if ours is not None and theirs is not None:
            change = f" ({(theirs - ours) / ours:+.0%})" if ours else ""
            yield f"{name + ':':<14}{_figure(ours)} -> {_figure(theirs)} {unit}{change}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _short(value: str) -> str:
    value = str(printable(value))
    return value if len(value) <= _WIDE else f"{value[: _WIDE - 3]}..."
