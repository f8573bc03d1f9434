"""Which failure that ranks have recorded is the cause: one rule, for a node's runner and for the run's result."""

from __future__ import annotations

from collections.abc import Callable, Iterable

ENDED = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
"""What gloo and NCCL tell a rank whose peer has ended."""
UNNOTICED_S = 5.0
"""Seconds in which ranks may die of another's end before that is recorded."""


def follows(lines: Iterable[str]) -> bool:
    """Whether the last lines of a rank tell that another ended first."""
    return any(sign in line for line in lines for sign in ENDED)


def order(time: float, first: float, is_follower: Callable[[], bool]) -> float:
    """By which failures are sorted, of which the `first` is of that time.

    What tells of its own failure comes before a rank that tells only of another's end: that may be the quicker one.
    """
    return time + UNNOTICED_S * (time < first + UNNOTICED_S and is_follower())
