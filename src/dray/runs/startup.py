"""How long each part of an attempt's start took, on the first node (for the run as a whole) and on each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from dray.contract.findings import measured
from dray.contract.start_times import NAMES, OWN, SBCAST, STAGE, TFLOPS, clean
from dray.runs.store import RunPaths, Table, read_json

_NODES = 256  # in a result, with all their parts
_LINES = 8


class Slowest(BaseModel):
    """The node that took the longest for a part."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    node: str
    """The node's name."""
    s: float
    """The value measured there."""


class Startup(BaseModel):
    """The measured parts of the start; a missing part was not measured or did not happen."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    parts: dict[str, float]
    """Seconds of the run as a whole: the queue by Slurm's clock, the rest by the first node's clock. Waiting for other
    nodes is part of `rendezvous`, `preflight`, `process_groups`, `model` and `first_step`."""
    slowest: dict[str, Slowest] = {}
    """The slowest node, for each part that a node does by itself."""
    nodes: dict[str, dict[str, float]] = {}
    """The parts of each node, for at most 256 nodes; startup.json has all nodes."""
    tflops: Slowest | None = None
    """TFLOP/s of the slowest GPU in 16-bit matrix products, before the launch."""


def read(paths: RunPaths, names: Sequence[str], queue_s: float | None = None) -> Startup | None:
    """The start-up of an attempt with these nodes, finished or not; None if nothing was measured."""
    rows = [clean(row) for row in _file(paths).get("nodes", [])]
    first = rows[0] if rows else {}
    whole = {"queue": queue_s} if queue_s is not None else {}
    whole |= _parts(first)
    if SBCAST in first:
        whole[STAGE] = round(first.get(STAGE, 0.0) + first[SBCAST], 3)
    nodes = {name: row for name, row in zip(names, rows, strict=False) if row}
    if not whole and not nodes:
        return None
    slowest = {}
    for part in OWN if len(nodes) > 1 else ():
        times = [(row[part], name) for name, row in nodes.items() if part in row]
        if times:
            seconds, name = max(times)
            slowest[part] = Slowest(node=name, s=seconds)
    speeds = [Slowest(node=name, s=row[TFLOPS]) for name, row in nodes.items() if TFLOPS in row]
    return Startup(
        parts=whole,
        slowest=slowest,
        nodes={name: _parts(row) for name, row in list(nodes.items())[:_NODES]},
        tflops=min(speeds, key=lambda speed: speed.s, default=None),
    )


def step(paths: RunPaths) -> str:
    """Slurm's number of the step that ran the nodes."""
    return str(_file(paths).get("step", ""))


def _file(paths: RunPaths) -> Table:
    return read_json(paths.startup, []) or {}


def _parts(row: dict[str, float]) -> dict[str, float]:
    return {part: seconds for part, seconds in row.items() if part in NAMES}


def lines(startup: Startup | None) -> Iterator[str]:
    """Lines for the whole run and for each node; of more than 8 nodes only those slower than the first node."""
    if startup is None:
        return
    if startup.parts:
        yield f"start-up: {_text(startup.parts)}"
    if 1 < len(startup.nodes) <= _LINES:
        yield from (f"start-up of {name}: {_text(parts)}" for name, parts in startup.nodes.items())
        return
    slower = [
        f"{NAMES[part]} {measured(slowest.s)} on {slowest.node}"
        for part, slowest in startup.slowest.items()
        if slowest.s > startup.parts.get(part, slowest.s)
    ]
    if slower:
        yield f"slowest nodes at start-up: {', '.join(slower)}"


def _text(parts: dict[str, float]) -> str:
    return ", ".join(f"{NAMES[part]} {measured(seconds)}" for part, seconds in parts.items())
