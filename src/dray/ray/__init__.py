"""`launcher = "ray"`: one Ray cluster of a job's nodes. A program of its own, which the runner starts on each node."""
