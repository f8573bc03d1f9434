"""How long each part of an attempt's start took, on the first node (for the run as a whole) and on each node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from dray.contract import files
from dray.contract.findings import measured
from dray.contract.start_times import CONTAINER, NAMES, OWN, PARTS, SBCAST, STAGE, TFLOPS, clean
from dray.runs.store import RunPaths

_NODES = 256  # in a result, with all their parts
_LINES = 8


class Slowest(BaseModel):
    """The node that took the longest for a part."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    node: str
    """The node's name."""
    s: float
    """The value measured there."""


def _parts(told: Any) -> dict[str, float]:  # noqa: ANN401  any JSON value
    found = clean(told)
    queue = clean({CONTAINER: told.get("queue")}) if isinstance(told, dict) else {}
    return {**({"queue": queue[CONTAINER]} if queue else {}), **{name: found[name] for name in PARTS if name in found}}


class Startup(BaseModel):
    """The measured parts of the start; a missing part was not measured or did not happen."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    parts: Annotated[dict[str, float], BeforeValidator(_parts)]
    """Seconds of the run as a whole: the queue by Slurm's clock, the rest by the first node's clock. Waiting for other
    nodes is part of `rendezvous`, `preflight`, `process_groups`, `model` and `first_step`."""
    slowest: dict[str, Slowest] = {}
    """The slowest node, for each part that a node does by itself."""
    nodes: dict[str, Annotated[dict[str, float], BeforeValidator(_parts)]] = {}
    """The parts of each node, for at most 256 nodes; startup.json has all nodes."""
    tflops: Slowest | None = None
    """TFLOP/s of the slowest GPU in 16-bit matrix products, before the launch."""


def read(paths: RunPaths, names: Sequence[str], queue_s: float | None = None) -> Startup | None:
    """The start-up of an attempt with these nodes, finished or not; None if nothing was measured."""
    told: Any = None
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(files.read(paths.startup))
    rows = told.get("nodes") if isinstance(told, dict) and told.get("attempt") == paths.attempt else None
    rows = [clean(row) for row in rows[: len(names)]] if isinstance(rows, list) else []
    nodes = {name: row for name, row in zip(names, rows, strict=False) if row}
    first = rows[0] if rows else {}
    sent = {STAGE: first.get(STAGE, 0.0) + first[SBCAST]} if SBCAST in first else {}
    whole = _parts({"queue": queue_s, **first, **sent})
    if not whole and not nodes:
        return None
    slowest = {part: _longest(nodes, part) for part in OWN} if len(nodes) > 1 else {}
    speed = min(((row[TFLOPS], name) for name, row in nodes.items() if TFLOPS in row), default=None)
    return Startup(
        parts=whole,
        slowest={part: found for part, found in slowest.items() if found},
        nodes={name: _parts(row) for name, row in list(nodes.items())[:_NODES]},
        tflops=Slowest(node=speed[1], s=speed[0]) if speed else None,
    )


def step(paths: RunPaths) -> str:
    """Slurm's number of the step that ran the nodes."""
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(files.read(paths.startup))
        return str(told.get("step", "")) if isinstance(told, dict) else ""
    return ""


def _longest(nodes: dict[str, dict[str, float]], part: str) -> Slowest | None:
    found = max(((row[part], name) for name, row in nodes.items() if part in row), default=None)
    return Slowest(node=found[1], s=found[0]) if found else None


def lines(found: Startup | None) -> list[str]:
    """Lines for the whole run and for each node; of more than 8 nodes only those slower than the first node."""
    if found is None:
        return []
    told = [f"start-up: {_text(found.parts)}"] if found.parts else []
    if 1 < len(found.nodes) <= _LINES:
        return [*told, *(f"start-up of {name}: {_text(parts)}" for name, parts in found.nodes.items())]
    slower = [
        f"{NAMES[part]} {measured(one.s)} on {one.node}"
        for part, one in found.slowest.items()
        if part in NAMES and one.s > found.parts.get(part, one.s)
    ]
    return [*told, *([f"slowest nodes at start-up: {', '.join(slower)}"] if slower else [])]


def _text(parts: dict[str, float]) -> str:
    return ", ".join(f"{NAMES[part]} {measured(seconds)}" for part, seconds in parts.items())
