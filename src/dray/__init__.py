"""dray: build or adopt one container image, and train in it on the nodes of a Slurm cluster."""

__version__ = "0.1.0"
