"""The cost of attempts: time on nodes and GPUs, and the energy that Slurm counted. Nothing is estimated."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from dray.runs import slurm
from dray.runs.store import Attempt, Run, RunPaths

if TYPE_CHECKING:
    from dray.planning.schema import Plan


class Cost(BaseModel):
    """The cost of one attempt."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    seconds: Annotated[float, Field(ge=0, le=1e7)]
    """Seconds from planning to end, by one clock."""
    nodes: Annotated[int, Field(ge=1, le=1 << 20)]
    """All nodes of the job, spare nodes too."""
    gpus: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """GPUs on all nodes."""
    joules: Annotated[float, Field(gt=0)] | None = None
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


def here(paths: RunPaths, plan: Plan, seconds: float) -> Cost | None:
    """The cost of an attempt without Slurm: one node, whatever number of nodes the plan has."""
    with suppress(ValueError):
        gpus = int(Attempt(Run(paths.run), paths.attempt).facts.get("gpus_per_node") or 0)
        gpus *= len(plan.world.nodes) * (plan.variant != "cpu")
        return Cost(seconds=round(seconds, 1), nodes=1, gpus=gpus)
    return None


def parse(known: str, job: int, step: str) -> Cost | None:
    """The cost from `begun_s=S ended_s=S allocated_nodes=N allocated_gpus=N` of the job's script, and sacct's lines.

    The energy is that of the step that started the nodes; the job's own sum counts the same energy again.
    """
    fields = slurm.fields(known)
    try:
        nodes = int(fields["allocated_nodes"])
        seconds = float(fields["ended_s"]) - float(fields["begun_s"])
        gpus = int(fields.get("allocated_gpus", "0")) * nodes
        counted = re.findall(rf"^sacct={job}\.{step}\|(\d{{1,13}})\|?$", known, re.MULTILINE) if step else []
        joules = float(counted[-1]) if counted else 0.0  # where Slurm does not count energy, sacct prints 0 or nothing
        return Cost(seconds=round(seconds, 1), nodes=nodes, gpus=gpus, joules=joules or None)
    except (KeyError, ValueError):  # pydantic's ValidationError is a ValueError
        return None


def queue_s(known: str) -> float | None:
    """Seconds from submission to start, by Slurm's clock; only for the first attempt of a batch job."""
    fields = slurm.fields(known)
    if fields.get("first_of_job") != "1" or not slurm.is_batch(fields):
        return None
    with suppress(KeyError, ValueError, OverflowError):
        times = [time.strptime(fields[name], "%Y-%m-%dT%H:%M:%S") for name in ("SubmitTime", "StartTime")]
        waited = time.mktime(times[1]) - time.mktime(times[0])
        return waited if 0 <= waited < 1e7 else None  # else a clock was set
    return None


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
    """`12.3 GPU-hours, 4.10 kWh`; empty if no cost is known."""
    if found is None:
        return ""
    parts = [_hours(found, "hours")]
    parts += [f"{_figure(found.kwh)} kWh"] if found.kwh is not None else []
    parts += [f"without attempt {' and '.join(map(str, found.unknown))}"] if found.unknown else []
    return ", ".join(parts)


def short(found: Spent | None) -> str:
    """`12.3 GPU-h`, after a `>` if an attempt's cost is unknown."""
    return f"{'>' * bool(found.unknown)}{_hours(found, 'h')}" if found else ""


def _hours(found: Spent, unit: str) -> str:
    if found.gpu_hours is None:
        return f"{_figure(found.node_hours)} node-{unit}"
    return f"{_figure(found.gpu_hours)} GPU-{unit}"


def _figure(value: float) -> str:
    """The value with about three digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:,.{digits}f}"
