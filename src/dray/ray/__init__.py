"""`launcher = "ray"`: one Ray cluster of a job's nodes, by a program that the runner starts on each node."""
