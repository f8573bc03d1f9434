"""The report's memory section: measured and estimated memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dray.runs.report.data import Run
from dray.runs.report.document import MISSING, Item, Text
from dray.runs.report.numbers import per_run
from dray.runs.report.plots import curve

_LINE = re.compile(r"^([0-9.]{1,20}) GB (on each GPU|on each node's host): (.*)$", re.MULTILINE)
_GPU, _HOST = "on each GPU", "on each node's host"


def items(runs: Sequence[Run]) -> Iterator[Item]:
    """A table, and the peak memory over the steps."""
    yield per_run("Memory, estimated by the plan and measured", runs, (
        ("estimate, on each GPU", lambda run: _estimate(run, _GPU)),
        ("its parts", lambda run: _parts(run, _GPU)),
        ("estimate, on each node's host", lambda run: _estimate(run, _HOST)),
        ("its parts, on the host", lambda run: _parts(run, _HOST)),
        ("peak of rank 0", _peak),
        ("peak / estimate", _ratio),
    ))  # fmt: skip
    if any(run.plan and run.plan.variant == "cpu" for run in runs):
        yield Text(
            "Without a GPU the peak is the memory of rank 0's process, including Python and torch. The estimate is for "
            "all ranks of a node and does not include these."
        )
    yield curve(runs, "memory_gb", "Peak memory of rank 0", "GB", from_zero=True)


def _found(run: Run, where: str) -> tuple[float, str] | None:
    held = run.plan.reasons.get("memory", "") if run.plan else ""
    for size, place, parts in _LINE.findall(held[:10_000]):
        if place == where:
            try:
                return float(size), parts
            except ValueError:
                return None
    return None


def _estimate(run: Run, where: str) -> str:
    found = _found(run, where)
    return f"{found[0]:.1f} GB" if found else "none" if run.plan else MISSING


def _parts(run: Run, where: str) -> str:
    found = _found(run, where)
    return found[1] if found else "none" if run.plan else MISSING


def _peak(run: Run) -> str:
    peak = max(run.trace.values("memory_gb"), default=None)
    kind = "" if not run.plan else " of the host's memory" if run.plan.variant == "cpu" else " of the GPU's memory"
    return MISSING if peak is None else f"{peak:.2f} GB{kind}"


def _ratio(run: Run) -> str:
    peak, found = max(run.trace.values("memory_gb"), default=None), _found(run, _GPU)
    return f"{peak / found[0]:.0%}" if peak is not None and found and found[0] else "not comparable"
