"""What dray itself writes into a node's log, and its supervisor into a rank's."""


def say(text: object) -> None:
    """Print a line for who reads the log. A disk that is full, or a reader that is gone, must not end the run."""
    try:  # noqa: SIM105  as in children
        print(f"dray: {text}", flush=True)
    except OSError:
        pass
