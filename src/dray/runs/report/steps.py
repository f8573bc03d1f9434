"""The report's section on step times, per node, and on slow ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from dray.runs.metrics import number
from dray.runs.report.data import Run
from dray.runs.report.document import Item, Table, Text
from dray.runs.report.numbers import seconds
from dray.runs.report.plots import curve

_LISTED = 512


def items(runs: Sequence[Run]) -> Iterator[Item]:
    """The step times of each run, then the own times of each node."""
    whole = [(run.name if len(runs) > 1 else "all steps", run.trace.values("step_s")) for run in runs]
    if found := [(name, values) for name, values in whole if values]:
        yield curve(runs, "step_s", "Seconds per step", "seconds, mean since the last logged step", from_zero=True)
        yield _quantiles("How long a step took", "run" if len(runs) > 1 else "of", found)
    else:
        yield Text("No step was logged.")
    for run in runs:
        yield from _nodes(run, f" of {run.name}" if len(runs) > 1 else "")


def _nodes(run: Run, of: str) -> Iterator[Item]:
    nodes = sorted(
        ((name, [*values]) for name, values in run.trace.nodes.items()), key=lambda one: -statistics.median(one[1])
    )
    if nodes:
        yield Text(
            "All ranks wait for one another in each step, so the step time is the same on all nodes. A node's own time "
            "is the forward pass and the wait for data of its slowest rank, without waiting for other ranks."
        )
        yield _quantiles(f"Own step time of each node{of}", "node", nodes[:_LISTED])
    elif run.trace.columns["step"]:
        yield Text(f"Own step time of each node{of}: not measured. It needs several ranks and ddp, zero1 or zero2.")
    slow = run.trace.of("slow")
    if slow:
        rows = tuple(
            (f"rank {_whole(one, 'rank')}", str(one.get("node"))[:100], f"{number(one, 'times') or 0:.2f}",
             _whole(one, "step"), str(one["attempt"]))
            for one in slow
        )  # fmt: skip
        head = ("rank", "node", "times the median rank", "reported at step", "attempt")
        yield Table(f"Slow ranks{of}", head, rows)
    elif nodes:
        yield Text(f"No rank{of} was steadily slower than the others (1.25 times the median rank).")


def _whole(event: dict[str, object], key: str) -> str:
    value = number(event, key)
    return f"{value:,.0f}" if value is not None else "unknown"


def _quantiles(caption: str, head: str, named: Sequence[tuple[str, Sequence[float]]]) -> Table:
    rows = []
    for name, values in named:
        ordered = sorted(values)
        at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.95, 0.99)]
        shown = (ordered[0], statistics.median(ordered), *at, ordered[-1])
        rows.append((name, f"{len(ordered):,}", *map(seconds, shown)))
    return Table(caption, (head, "logged steps", "minimum", "median", "95 %", "99 %", "maximum"), tuple(rows))
