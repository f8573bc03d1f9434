"""Readable numbers, and tables with a column for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dray.contract.findings import measured
from dray.runs.report.data import Run
from dray.runs.report.document import MISSING, Table

Cell = tuple[str, Callable[[Run], str]]


def per_run(caption: str, runs: Sequence[Run], rows: Sequence[Cell]) -> Table:
    """A table with a row for each measure and a column for each run."""
    names = ("value",) if len(runs) == 1 else tuple(run.name for run in runs)
    return Table(caption, ("measure", *names), tuple((name, *(cell(run) for run in runs)) for name, cell in rows))


def figure(value: float | None, digits: int = 0) -> str:
    """The number with at most `digits` decimals; fewer in large numbers, three significant digits in small ones."""
    if value is None:
        return MISSING
    size = abs(value)
    if size >= 1e15 or 0 < size < 10.0 ** -max(digits, 1):
        return f"{value:.3g}"
    return f"{value:,.{max(0, digits - len(f'{size:.0f}') + 1)}f}"


def seconds(value: float | None, none: str = MISSING) -> str:
    """A measured time."""
    return none if value is None else measured(value)


def at_the_ends(values: Sequence[float], digits: int) -> tuple[str, ...]:
    """The first and the last value."""
    return (figure(values[0], digits), figure(values[-1], digits)) if values else ()


def steps_of(run: Run) -> str:
    """The steps taken, of the planned steps."""
    taken = run.trace.columns["step"][-1] if run.trace.columns["step"] else None
    starts = run.trace.of("start")
    asked = starts[-1].get("steps") if starts else None
    return figure(taken) + (f" of {asked:,}" if taken is not None and isinstance(asked, int) else "")
