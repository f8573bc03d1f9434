"""The progress of a fetch: a line every few seconds, the same in a terminal and in a log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

Say = Callable[[str], None]

_EVERY_S = 5.0
_STALLED_S = 30.0
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
        self._began = self._told = self._moved = clock()
        self._done = 0

    def at(self, done: int) -> None:
        """Report how many bytes have arrived in all."""
        now = self._clock()
        if done != self._done:
            self._done, self._moved = done, now
        elif now - self._moved < _STALLED_S or now - self._told < _STALLED_S:
            return
        if done >= _LEAST and now - self._told >= _EVERY_S:
            self._told = now
            self._say(f"dray: {self._what}: {self._line(now)}")

    def _line(self, now: float) -> str:
        known = self.total >= self._done  # an estimate that was too low is dropped
        text = f"{self._done / 1e6:.0f}{f' of {self.total / 1e6:.0f}' if known else ''} MB"
        if now - self._moved >= _STALLED_S:
            return f"{text}, no data for {now - self._moved:.0f} s"
        if not known or self._done < _ENOUGH:
            return text
        minutes = (self.total - self._done) / self._done * (now - self._began) / 60
        return f"{text}, {f'about {minutes:.0f} min' if minutes >= 1 else 'less than a minute'} left"


@contextmanager
def watch(folder: Path, what: str, *, total: int = 0, say: Say) -> Iterator[None]:
    """While the body runs, report how many bytes the folder has gained."""
    before, ended = size(folder), Event()
    progress = Progress(what, total=total, say=say)

    def look() -> None:
        pause = _LOOK_S
        while not ended.wait(pause):
            began = time.monotonic()
            progress.at(max(0, size(folder) - before))
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
            try:
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118  thousands of files a second
            except OSError:
                continue
    return total


def pulled(
    answers: Iterable[Mapping[str, Any]], what: str, *, say: Say, clock: Callable[[], float] = time.monotonic
) -> str:
    """Report the progress of Docker's pull from its API's stream. Returns the error that ended it, or nothing."""
    progress = Progress(what, say=say, clock=clock)
    layers: dict[str, tuple[int, int]] = {}
    problem = ""
    for answer in answers:
        detail, layer = answer.get("progressDetail") or {}, str(answer.get("id", ""))
        if answer.get("status") == "Downloading" and detail.get("total"):
            layers[layer] = (int(detail.get("current", 0)), int(detail["total"]))
        elif answer.get("status") == "Download complete" and layer in layers:
            layers[layer] = (layers[layer][1], layers[layer][1])
        progress.total = sum(total for _, total in layers.values())
        progress.at(sum(done for done, _ in layers.values()))
        problem = str(answer.get("error", "")) or problem
    return problem


class Silence:
    """A line after some silence: which step runs, and for how long. The longer the silence, the fewer the lines."""

    _FIRST_S, _MOST_S = 15.0, 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step, self._began = "", clock()
        self._told, self._wait = self._began, self._FIRST_S

    def shown(self, line: str) -> None:
        """Note that the user has seen this line."""
        self._told, self._wait = self._clock(), self._FIRST_S
        own = line.startswith("dray: ")
        step = line.removeprefix("dray: ").partition(": ")[0] if own else line[:_WIDTH]
        step = "" if own and " done in " in line else step
        if step != self._step:
            self._step, self._began = step, self._told

    def line(self) -> str:
        """The line to show now, or nothing."""
        now = self._clock()
        if now - self._told < self._wait:
            return ""
        self._told, self._wait = now, min(2 * self._wait, self._MOST_S)
        return f"dray: {self._step or 'the build'}: {now - self._began:.0f} s so far"
