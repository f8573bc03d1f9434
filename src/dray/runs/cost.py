"""The cost of attempts: time on nodes and GPUs, and the energy that Slurm counted. Nothing is estimated.

runs/accounting.py collects it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST = 1e7  # seconds: no job is longer
MOST_J = 1e13  # the energy of ten thousand nodes of 3 kW for four days


class Cost(BaseModel):
    """The cost of one attempt."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    seconds: Annotated[float, Field(ge=0, le=MOST)]
    """Seconds from planning to end, by one clock."""
    nodes: Annotated[int, Field(ge=1, le=1 << 20)]
    """All nodes of the job, spare nodes too."""
    gpus: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """GPUs on all nodes."""
    joules: Annotated[float, Field(gt=0, le=MOST_J)] | None = None
    """Energy of these nodes in joules, by Slurm's accounting; None if Slurm does not count it."""


class Spent(BaseModel):
    """The cost of all attempts."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    node_hours: float
    """Nodes times hours."""
    gpu_hours: float | None = None
    """GPUs times hours; None if the job had no GPUs."""
    kwh: float | None = None
    """Energy of the nodes in kWh; None unless Slurm's accounting has it for every attempt."""
    unknown: list[int] = []
    """Attempts whose cost was not recorded; the figures do not include them."""


def spent(attempts: Sequence[tuple[int, Cost | None]]) -> Spent | None:
    """The sum over attempts, each with its number; None if no cost is known."""
    known = [cost for _, cost in attempts if cost]
    if not known:
        return None
    joules = [cost.joules for cost in known if cost.joules]
    gpus = [cost.seconds * cost.gpus for cost in known if cost.gpus]
    return Spent(
        node_hours=round(sum(cost.seconds * cost.nodes for cost in known) / 3600, 4),
        gpu_hours=round(sum(gpus) / 3600, 4) if gpus else None,
        kwh=round(sum(joules) / 3.6e6, 4) if len(joules) == len(known) else None,
        unknown=[number for number, cost in attempts if cost is None],
    )


def text(found: Spent | None) -> str:
    """`12.3 GPU-hours, 4.1 kWh`; empty if no cost is known."""
    if found is None:
        return ""
    hours = f"{_figure(found.node_hours)} node-hours" if found.gpu_hours is None else ""
    parts = [hours or f"{_figure(found.gpu_hours or 0.0)} GPU-hours"]
    parts += [f"{_figure(found.kwh)} kWh"] if found.kwh is not None else []
    parts += [f"without attempt {' and '.join(map(str, found.unknown[:8]))}"] if found.unknown else []
    return ", ".join(parts)


def short(found: Spent | None) -> str:
    """`12.3 GPU-h`, after a `>` if an attempt's cost is unknown."""
    if found is None:
        return ""
    value, unit = (found.node_hours, "node-h") if found.gpu_hours is None else (found.gpu_hours, "GPU-h")
    return f"{'>' * bool(found.unknown)}{_figure(value)} {unit}"


def _figure(value: float) -> str:
    """The value with about three digits."""
    digits = 0 if value >= 100 or not math.isfinite(value) else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:,.{digits}f}"
