"""The progress of a fetch: a line every few seconds, the same in a terminal and in a log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

Say = Callable[[str], None]
"""Prints a line of the build."""
# A fetch that takes less needs no line.
_EVERY_S = 5.0
# Less tells nothing of the minutes that are left.
_ENOUGH = 50_000_000
_LEAST = 500_000


@contextmanager
def every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """While the body runs, call a function after each of these pauses."""
    ended = Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def watch(folder: Path, what: str, *, total: int = 0, say: Say) -> Iterator[None]:
    """While the body runs, report how many bytes the folder has gained, of `total` if that is known."""
    before, began, reported = size(folder), time.monotonic(), 0

    def look() -> None:
        nonlocal reported
        gained = size(folder) - before
        if gained - reported > _LEAST:
            reported = gained
            say(f"dray: {what}: {amount(gained, total, time.monotonic() - began)}")

    with every(_EVERY_S, look):
        yield


def amount(done: int, total: int, seconds: float) -> str:
    """How much has arrived in these seconds, and the minutes that are left. A total that was too low is dropped."""
    if done > total:
        return f"{done / 1e6:.0f} MB"
    text = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
    if done > _ENOUGH:
        minutes = (total - done) / done * seconds / 60
        text += f", about {max(1, round(minutes))} min left"
    return text


def size(folder: Path) -> int:
    """The bytes of all files below the folder; files that vanish meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{place}/{name}").st_size
    return total
