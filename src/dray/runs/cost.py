"""What attempts cost: nodes and GPUs for so long, and the energy that Slurm has counted. Nothing of it is estimated."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dray import facts
from dray.contract import files
from dray.contract.findings import DrayError
from dray.planning.schema import Plan
from dray.runs.paths import RunPaths

_MOST = 1e7  # seconds: no job is longer
_MOST_J = 1e13  # the energy of ten thousand nodes of 3 kW for four days


class Cost(BaseModel):
    """Of one attempt."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    seconds: Annotated[float, Field(ge=0, le=_MOST)]
    """From its planning to its end, by one clock."""
    nodes: Annotated[int, Field(ge=1, le=1 << 20)]
    """All that the job had, spare nodes too."""
    gpus: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """On all of them together."""
    joules: Annotated[float, Field(gt=0, le=_MOST_J)] | None = None
    """Of these nodes, by Slurm's accounting; None where that counts none."""


class Spent(BaseModel):
    """By all attempts together."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    node_hours: float
    """Hours of a node."""
    gpu_hours: float | None = None
    """Hours of a GPU; None where the job had no GPUs."""
    kwh: float | None = None
    """Energy of the nodes; None where Slurm's accounting has counted no energy, or not that of each attempt."""
    unknown: list[int] = []
    """Attempts whose cost nobody has written down: the figures are without them."""


def of(told: object) -> Cost | None:
    """What a result has; None for a damaged one."""
    with suppress(ValidationError):
        return told if isinstance(told, Cost) else Cost.model_validate(told)
    return None


def spent_of(told: object) -> Spent | None:
    """Likewise, for all attempts."""
    with suppress(ValidationError):
        return told if isinstance(told, Spent) else Spent.model_validate(told)
    return None


def spent(attempts: Sequence[tuple[int, Cost | None]]) -> Spent | None:
    """Of the attempts with these numbers; None where nothing is known of any."""
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


def here(paths: RunPaths, plan: Plan, seconds: float) -> Cost | None:
    """Of an attempt on this machine, whose nodes are all the same one."""
    with suppress(OSError, DrayError, ValidationError):
        gpus = facts.parse(files.text(paths.facts, "the facts"), where=str(paths.facts)).gpus_per_node
        gpus *= len(plan.world.nodes) * (plan.variant != "cpu")
        return Cost(seconds=round(seconds, 1), nodes=1, gpus=gpus)
    return None


def parse(known: str, job: int, step: str) -> Cost | None:
    """By what the job's script tells: `begun_s=S ended_s=S allocated_nodes=N allocated_gpus=N`, and sacct's lines."""
    told = dict(re.findall(r"\b(begun_s|ended_s|allocated_nodes|allocated_gpus)=([0-9.]{1,20})(?!\S)", known))
    try:
        nodes = int(told["allocated_nodes"])
        seconds = float(told["ended_s"]) - float(told["begun_s"])
        gpus = int(told.get("allocated_gpus", "0")) * nodes
        return Cost(seconds=round(seconds, 1), nodes=nodes, gpus=gpus, joules=_joules(known, job, step))
    except (KeyError, ValueError):  # of which pydantic's is one
        return None


def _joules(known: str, job: int, step: str) -> float | None:
    """Of the step alone that started the nodes: those of the job itself count the same energy again.

    Where a site's Slurm counts none, sacct has 0 or nothing.
    """
    found = re.findall(rf"^sacct={job}\.{step}\|([0-9]{{1,13}})\|?$", known, re.MULTILINE) if step else []
    joules = float(found[-1]) if found else 0.0
    return joules if 0 < joules <= _MOST_J else None


def queue_s(known: str) -> float | None:
    """From the submission to the start, both by Slurm's clock; only of a batch job's first attempt."""
    if not re.search(r"(?m)^first_of_job=1$", known) or not re.search(r"(?:^|\s)BatchFlag=1(?:\s|$)", known):
        return None
    times = [re.search(rf"(?:^|\s){name}=(\S{{19}})(?:\s|$)", known) for name in ("SubmitTime", "StartTime")]
    try:
        begin, end = (time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) for found in times if found)
    except (ValueError, OverflowError):
        return None
    return end - begin if 0 <= end - begin < _MOST else None


def text(found: Spent | None) -> str:
    """As `12.3 GPU-hours, 4.1 kWh`; empty where nothing is known."""
    if found is None:
        return ""
    hours = f"{_figure(found.node_hours)} node-hours" if found.gpu_hours is None else ""
    parts = [hours or f"{_figure(found.gpu_hours or 0.0)} GPU-hours"]
    parts += [f"{_figure(found.kwh)} kWh"] if found.kwh is not None else []
    parts += [f"without attempt {' and '.join(map(str, found.unknown[:8]))}"] if found.unknown else []
    return ", ".join(parts)


def short(found: Spent | None) -> str:
    """As `12.3 GPU-h`; `>` where an attempt is not in it."""
    if found is None:
        return ""
    value, unit = (found.node_hours, "node-h") if found.gpu_hours is None else (found.gpu_hours, "GPU-h")
    return f"{'>' * bool(found.unknown)}{_figure(value)} {unit}"


def _figure(value: float) -> str:
    """Three digits at least, and never more than are known."""
    digits = 0 if value >= 100 or not math.isfinite(value) else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:,.{digits}f}"
