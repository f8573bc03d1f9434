"""A real Slurm with a real Apptainer on one machine: a controller and n1 to nN, each a Docker container."""

from dray.cluster.local import LocalCluster

__all__ = ["LocalCluster"]
