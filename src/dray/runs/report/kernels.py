"""The report's section about profiled steps: the longest kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dray.runs.metrics import number, whole
from dray.runs.report.data import Run
from dray.runs.report.document import Item, Section, Table, Text
from dray.runs.report.numbers import figure

_MOST = 20  # rows
_NAME = 120  # letters of a kernel's name


def sections(runs: Sequence[Run]) -> Iterator[Section]:
    """A section if any run has profiled steps."""
    items = tuple(item for run in runs for item in _items(run, f" of {run.name}" if len(runs) > 1 else ""))
    if items:
        yield Section("Profile", items)


def _items(run: Run, name: str) -> Iterator[Item]:
    """The last attempt that has a profile."""
    profile = next((attempt.profile for attempt in reversed(run.tries) if "rows" in attempt.profile), {})
    rows = profile.get("rows")
    if not isinstance(rows, list):
        return
    kind = "operators" if profile.get("kind") == "operators" else "kernels"
    first, last = (figure(whole(profile, key)) for key in ("first_step", "last_step"))
    cells = tuple(_cells(row) for row in rows[:_MOST] if isinstance(row, dict))
    yield Table(f"{kind} of steps {first} to {last}{name}", (kind[:-1], "calls", "total ms", "share"), cells)
    total = figure(number(profile, "total_ms"), 2)
    where = "of the GPU" if kind == "kernels" else "of the CPU"
    yield Text(f"Rank 0 alone. All {kind} {where} took {total} ms. Trace, for ui.perfetto.dev: {profile['trace']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    share = number(row, "share")
    return (
        str(row.get("name"))[:_NAME],
        figure(whole(row, "calls")),
        figure(number(row, "ms"), 3),
        "" if share is None else f"{share:.1%}",
    )
