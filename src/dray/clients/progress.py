"""The progress of a fetch: a line every few seconds, the same in a terminal and in a log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

Say = Callable[[str], None]

_EVERY_S = 5.0
_LOOK_S = 1.0
# Less tells nothing of the minutes that are left.
_ENOUGH = 50_000_000
_LEAST = 500_000
_WIDTH = 100


class Progress:
    """The lines of one fetch. The first comes after five seconds: a fast fetch needs none."""

    def __init__(self, what: str, *, total: int = 0, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        """Bytes in all; 0 if they are not known."""
        self._what, self._say, self._clock = what, say, clock
        self._began = self._told = clock()
        self._done = 0

    def at(self, done: int) -> None:
        """Report how many bytes have arrived in all."""
        now = self._clock()
        if done <= max(self._done, _LEAST) or now - self._told < _EVERY_S:
            return
        self._done, self._told = done, now
        text = f"{done / 1e6:.0f}"
        if self.total >= done:  # an estimate that was too low is dropped
            text += f" of {self.total / 1e6:.0f}"
        text += " MB"
        if self.total >= done > _ENOUGH:
            minutes = (self.total - done) / done * (now - self._began) / 60
            text += f", about {max(1, round(minutes))} min left"
        self._say(f"dray: {self._what}: {text}")


@contextmanager
def watch(folder: Path, what: str, *, total: int = 0, say: Say) -> Iterator[None]:
    """While the body runs, report how many bytes the folder has gained."""
    before, ended = size(folder), Event()
    progress = Progress(what, total=total, say=say)

    def look() -> None:
        pause = _LOOK_S
        while not ended.wait(pause):
            began = time.monotonic()
            progress.at(size(folder) - before)
            pause = max(_LOOK_S, 20 * (time.monotonic() - began))  # on a network disk a look may take seconds

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def size(folder: Path) -> int:
    """The bytes of all files below the folder; files that vanish meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118  thousands of files a second
    return total


class Silence:
    """A line after each half minute without one: which step runs, and for how long."""

    _WAIT_S = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = "the build"
        self._began = self._told = clock()

    def shown(self, line: str) -> None:
        """Note that the user has seen this line. dray's own name the step: `dray: wheels: 5 MB`."""
        self._told = self._clock()
        step = line[:_WIDTH]
        if line.startswith("dray: "):
            step = "the build" if " done in " in line else line.split(": ")[1]
        if step != self._step:
            self._step, self._began = step, self._told

    def line(self) -> str:
        """The line to show now, or nothing."""
        now = self._clock()
        if now - self._told < self._WAIT_S:
            return ""
        self._told = now
        return f"dray: {self._step}: {now - self._began:.0f} s so far"
