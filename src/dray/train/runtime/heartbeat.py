"""This rank's heartbeat, which its node's runner reads: the step, the phase, and how long the next may take.

A beat costs a microsecond and waits for nothing. The next beat may take ten times as long as the slowest of its kind in
this run; until the first one, the limit is a generous default.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dray.contract import heartbeat as contract
from dray.contract.heartbeat import COMPILE, LEAST, START, STEP
from dray.train.errors import say

BEAT_S = 10.0
_TIMES = 10
_COMPILE_TIMES = 2  # a step may compile once more, in so many times as long as the first one


def boottime() -> int:
    """Return the time since boot, by which the batch script, the runner and the ranks measure a start."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Heartbeat:
    """The heartbeat of one rank; without a runner nobody reads it."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, contract.SIZE)
        self._slowest = dict.fromkeys(LEAST, 0.0)
        self._step, self._phase, self._set = 0, START, 0
        self._last = time.monotonic_ns()
        self._lap, self._spent = boottime(), [0 for _ in contract.MARKS]
        self._server: object = None

    def begin(self, limit: int | None, imported: int = 0) -> None:
        """Write into the file that the supervisor has made. `limit` is the recipe's hang_timeout_s, and `imported` the
        time by CLOCK_BOOTTIME at which all modules were imported."""
        self._set = limit or 0
        if path := os.environ.get(contract.VARIABLE):
            try:
                with Path(path).open("r+b") as file:
                    self._map = mmap.mmap(file.fileno(), contract.SIZE)
                self._server = _worker_server(contract.socket(path))
            except (OSError, ValueError) as error:
                say(f"this rank has no heartbeat: {error}")
        self._lap = imported or self._lap
        self._mark(contract.IMPORTED, imported)
        self.beat()

    def lap(self, part: int) -> None:
        """Add the time since the last lap to this part of the start."""
        now = boottime()
        self._spent[part] += now - self._lap
        self._lap = now
        self._mark(part, self._spent[part])

    def first_step(self, compiled: int) -> None:
        """Note that the first step is logged; `compiled` nanoseconds of it went into compiling."""
        if not self._spent[contract.FIRST_STEP]:
            self._spent[contract.FIRST_STEP] = boottime() - self._lap
            self._mark(contract.COMPILED, compiled)
            self._mark(contract.FIRST_STEP, max(1, self._spent[contract.FIRST_STEP] - compiled))

    def _mark(self, part: int, nanoseconds: int) -> None:
        contract.MARK.pack_into(self._map, contract.MARKS_AT + part * contract.MARK.size, nanoseconds)

    def beat(self) -> None:
        """Note progress: a step, or a part of other work."""
        now = time.monotonic_ns()
        self._slowest[self._phase] = max(self._slowest[self._phase], (now - self._last) / 1e9)
        self._last = now
        contract.BEAT.pack_into(self._map, contract.BEAT_AT, self._step, self._phase, self.limit(), now)

    def step(self, taken: int) -> None:
        """Note that so many steps are taken."""
        self._step = taken
        self.beat()

    def enter(self, phase: int) -> None:
        """Begin a phase."""
        self.beat()
        self._phase = phase
        self.beat()

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Surround a phase, after which the one before goes on."""
        before = self._phase
        self.enter(phase)
        yield
        self.enter(before)

    def limit(self) -> int:
        """The most seconds until the next beat."""
        slowest = self._slowest[self._phase]
        if self._phase != STEP:
            return int(max(LEAST[self._phase], _TIMES * slowest, self._set))
        return self._set or int(max(LEAST[STEP], _TIMES * slowest, _COMPILE_TIMES * self._slowest[COMPILE]))


def _worker_server(path: str) -> object:
    """Start torch's worker server on a socket in the node's folder: it answers while Python hangs."""
    try:
        from torch._C._distributed_c10d import _WorkerServer  # noqa: PLC0415  not in every torch

        return _WorkerServer(path)
    except (ImportError, RuntimeError, TypeError) as error:
        say(f"the report of a hang will list no collectives: {error}")
        return None


heartbeat = Heartbeat()


class Moved:
    """Bytes that a thread of this rank moves. Waiting code beats while they grow: a long copy is not a hang."""

    def __init__(self) -> None:
        self._bytes = self._seen = 0

    def count(self, size: int) -> None:
        """Add this many bytes."""
        self._bytes += size

    def beat(self) -> None:
        """Beat if more have moved since the last time; each BEAT_S seconds."""
        if self._seen != self._bytes:
            self._seen = self._bytes
            heartbeat.beat()
