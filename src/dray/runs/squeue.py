"""Goes: its names are in runs/slurm.py."""

from __future__ import annotations

from dray.runs.slurm import *  # noqa: F403
from dray.runs.slurm import Job, Slurm, is_batch, show

Queue = Slurm


def of_batch(job: Job) -> bool:
    """Whether it is a batch job."""
    return is_batch(show(job.id))
