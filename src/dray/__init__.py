"""dray starts your training script on every node of a Slurm cluster, inside a container image, with one command."""

__version__ = "0.1.0"
