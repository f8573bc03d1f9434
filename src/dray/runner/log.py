"""What dray itself writes into a node's log, and its supervisor into a rank's."""


def say(text: object) -> None:
    """Print a line for who reads the log."""
    print(f"dray: {text}", flush=True)
