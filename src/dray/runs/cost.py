"""The cost of attempts: time on nodes and GPUs. Nothing is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

from dray.runs import slurm
from dray.runs.store import Attempt, Run, RunPaths

if TYPE_CHECKING:
    from dray.planning.schema import Plan


class Cost(BaseModel):
    """The cost of one attempt."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    seconds: NonNegativeFloat
    """Seconds from planning to end, by one clock."""
    nodes: PositiveInt
    """All nodes of the job, spare nodes too."""
    gpus: NonNegativeInt = 0
    """GPUs on all nodes."""


class Spent(BaseModel):
    """The cost of all attempts."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    node_hours: float
    """Nodes times hours."""
    gpu_hours: float | None = None
    """GPUs times hours; None if the job had no GPUs."""
    unknown: list[int] = []
    """Attempts whose cost was not recorded; the figures do not include them."""


def here(paths: RunPaths, plan: Plan, seconds: float) -> Cost:
    """The cost of an attempt without Slurm: one node, whatever number of nodes the plan has."""
    per_node = Attempt(Run(paths.run), paths.attempt).facts.get("gpus_per_node", "")
    gpus = int(per_node) * len(plan.world.nodes) if per_node.isdecimal() and plan.variant != "cpu" else 0
    return Cost(seconds=round(seconds, 1), nodes=1, gpus=gpus)


def parse(known: str) -> Cost | None:
    """The cost from `begun_s=S ended_s=S allocated_nodes=N allocated_gpus=N` of the job's script."""
    fields = slurm.fields(known)
    try:
        seconds = float(fields["ended_s"]) - float(fields["begun_s"])
        nodes = int(fields["allocated_nodes"])
        gpus = int(fields.get("allocated_gpus", "0"))
        return Cost(seconds=round(seconds, 1), nodes=nodes, gpus=nodes * gpus)
    except (KeyError, ValueError):  # pydantic's ValidationError is a ValueError
        return None


def queue_s(known: str) -> float | None:
    """Seconds from submission to start, by Slurm's clock; only for the first attempt of a batch job."""
    fields = slurm.fields(known)
    if "first_of_job" not in fields or not slurm.is_batch(fields):
        return None
    with suppress(KeyError, ValueError):
        started, submitted = (datetime.fromisoformat(fields[name]) for name in ("StartTime", "SubmitTime"))
        return max(0.0, (started - submitted).total_seconds())  # negative if a clock was set
    return None


def spent(attempts: Sequence[tuple[int, Cost | None]]) -> Spent | None:
    """The sum over attempts, each with its number; None if no cost is known."""
    known = [cost for _, cost in attempts if cost]
    if not known:
        return None
    gpu_hours = sum(cost.seconds * cost.gpus for cost in known) / 3600
    return Spent(
        node_hours=round(sum(cost.seconds * cost.nodes for cost in known) / 3600, 4),
        gpu_hours=round(gpu_hours, 4) or None,
        unknown=[number for number, cost in attempts if cost is None],
    )


def text(found: Spent | None) -> str:
    """`12.34 GPU-h`, after a `>` if an attempt's cost is unknown; node-h without GPUs; empty if no cost is known."""
    if found is None:
        return ""
    more = ">" if found.unknown else ""
    if found.gpu_hours is None:
        return f"{more}{found.node_hours:,.2f} node-h"
    return f"{more}{found.gpu_hours:,.2f} GPU-h"
