"""A real Slurm with a real Apptainer on one machine: a controller and n1..nN, each a Docker container."""

from dray.cluster.desk import Desk

__all__ = ["Desk"]
