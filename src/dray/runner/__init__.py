"""The thin program in the container, one on each node. Standard library only: it costs milliseconds and no memory."""
