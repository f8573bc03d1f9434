"""The cost of an attempt, as counted by Slurm or by this machine."""

from __future__ import annotations

import re
import time
from contextlib import suppress

from pydantic import ValidationError

from dray import facts
from dray.contract import files
from dray.contract.findings import DrayError
from dray.planning.schema import Plan
from dray.runs.cost import MOST, MOST_J, Cost
from dray.runs.paths import RunPaths
from dray.runs.stop import of_a_batch_job


def here(paths: RunPaths, plan: Plan, seconds: float) -> Cost | None:
    """The cost of an attempt without Slurm: one node, whatever number of nodes the plan has."""
    with suppress(OSError, DrayError, ValidationError):
        gpus = facts.parse(files.text(paths.facts, "the facts"), where=str(paths.facts)).gpus_per_node
        gpus *= len(plan.world.nodes) * (plan.variant != "cpu")
        return Cost(seconds=round(seconds, 1), nodes=1, gpus=gpus)
    return None


def parse(known: str, job: int, step: str) -> Cost | None:
    """The cost from `begun_s=S ended_s=S allocated_nodes=N allocated_gpus=N` of the job's script, and sacct's lines."""
    told = dict(re.findall(r"\b(begun_s|ended_s|allocated_nodes|allocated_gpus)=([0-9.]{1,20})(?!\S)", known))
    try:
        nodes = int(told["allocated_nodes"])
        seconds = float(told["ended_s"]) - float(told["begun_s"])
        gpus = int(told.get("allocated_gpus", "0")) * nodes
        return Cost(seconds=round(seconds, 1), nodes=nodes, gpus=gpus, joules=_joules(known, job, step))
    except (KeyError, ValueError):  # pydantic's ValidationError is a ValueError
        return None


def _joules(known: str, job: int, step: str) -> float | None:
    """Energy of the step that started the nodes; the job's own sum counts the same energy again.

    Where Slurm does not count energy, sacct prints 0 or nothing.
    """
    found = re.findall(rf"^sacct={job}\.{step}\|([0-9]{{1,13}})\|?$", known, re.MULTILINE) if step else []
    joules = float(found[-1]) if found else 0.0
    return joules if 0 < joules <= MOST_J else None


def queue_s(known: str) -> float | None:
    """Seconds from submission to start, by Slurm's clock; only for the first attempt of a batch job."""
    if not re.search(r"(?m)^first_of_job=1$", known) or not of_a_batch_job(known):
        return None
    times = [re.search(rf"(?:^|\s){name}=(\S{{19}})(?:\s|$)", known) for name in ("SubmitTime", "StartTime")]
    try:
        begin, end = (time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) for found in times if found)
    except (ValueError, OverflowError):
        return None
    return end - begin if 0 <= end - begin < MOST else None
