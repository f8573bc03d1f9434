"""How long each part of an attempt's start took, on the first node (for the run as a whole) and on each node."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from dray.contract.findings import measured
from dray.contract.node_start import NAMES, SBCAST, STAGE, TFLOPS, valid_parts
from dray.runs.store import RunPaths, dig, read_json


class Slowest(BaseModel):
    """The node with the slowest GPU."""

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
    nodes: dict[str, dict[str, float]] = {}
    """The parts of each node."""
    tflops: Slowest | None = None
    """TFLOP/s of the slowest GPU in 16-bit matrix products, before the launch."""


def read(paths: RunPaths, names: Sequence[str], queue_s: float | None = None) -> Startup | None:
    """The start-up of an attempt with these nodes, finished or not; None if nothing was measured."""
    told = dig(read_json(paths.startup, []), "nodes")
    rows = [valid_parts(row) for row in told] if isinstance(told, list) else []
    if rows and SBCAST in rows[0]:
        rows[0][STAGE] = round(rows[0].get(STAGE, 0.0) + rows[0][SBCAST], 3)
    speeds = [(row[TFLOPS], name) for name, row in zip(names, rows, strict=False) if TFLOPS in row]
    nodes = {name: _parts(row) for name, row in zip(names, rows, strict=False) if row}
    parts = _parts(rows[0]) if rows else {}
    if queue_s is not None:
        parts = {"queue": queue_s, **parts}
    if not parts and not nodes:
        return None
    slowest = Slowest(node=min(speeds)[1], s=min(speeds)[0]) if speeds else None
    return Startup(parts=parts, nodes=nodes, tflops=slowest)


def _parts(row: dict[str, float]) -> dict[str, float]:
    return {part: seconds for part, seconds in row.items() if part in NAMES}


def text(startup: Startup) -> str:
    """The parts of the whole run's start in one line."""
    return "start-up: " + ", ".join(f"{NAMES.get(part, part)} {measured(s)}" for part, s in startup.parts.items())
