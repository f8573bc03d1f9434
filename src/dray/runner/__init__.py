"""The program that supervises a node's ranks, one on each node. Standard library only: it starts in milliseconds."""


def say(text: object) -> None:
    """Print a line of dray's own into a node's log, or a rank's. A full disk, or a reader that is gone, ends no run."""
    try:  # noqa: SIM105  as in children
        print(f"dray: {text}", flush=True)
    except OSError:
        pass
