"""Goes: its names are in runs/slurm.py."""

from dray.runs import slurm

meaning = slurm.meaning
