"""Which recorded failure is the cause: one rule for a node's runner and for the run's result."""

from __future__ import annotations

from collections.abc import Callable, Iterable

ENDED = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
"""What gloo and NCCL print in a rank whose peer has ended."""
UNNOTICED_S = 5.0
"""The rank that failed first may be recorded so many seconds after the ranks that failed because of it."""


def follows(lines: Iterable[str]) -> bool:
    """Whether a rank's last lines say that another rank ended first."""
    return any(sign in line for line in lines for sign in ENDED)


def order(time: float, first: float, is_follower: Callable[[], bool]) -> float:
    """The sort key of a failure; `first` is the time of the first one.

    What tells of its own failure comes before a rank that tells only of another's end: that may be the quicker one.
    """
    return time + UNNOTICED_S * (time < first + UNNOTICED_S and is_follower())
