"""Goes: its names are in runs/slurm.py."""

from __future__ import annotations

from dray.runs.slurm import *  # noqa: F403
