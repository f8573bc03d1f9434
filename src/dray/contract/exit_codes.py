"""The exit codes that a batch script may rely on. Anything else is the failed program's own."""

DONE = 0
FAILED = 1
UNFIT = 69
"""A node, a GPU or the fabric lacks what the run needs."""
RETRY = 75
"""Nothing is wrong with the run: start it again, as Slurm's requeue does."""
CONFIG = 78
"""What the user wrote cannot run as it stands."""
