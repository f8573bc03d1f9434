"""This rank's heartbeat, which its node's runner reads: the step, the phase, and how long the next may take.

A beat costs a microsecond and waits for nothing. How long it may take is ten times what the slowest of its kind has
taken in this run; before there is one, what nothing that works takes.
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

_TIMES = 10
_AGAIN = 2  # a step may compile once more


class Heartbeat:
    """Of one rank; without a runner it goes nowhere."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, contract.SIZE)
        self._slowest = dict.fromkeys(LEAST, 0.0)
        self._step, self._phase, self._set = 0, START, 0
        self._last = time.monotonic_ns()
        self._server: object = None

    def begin(self, limit: int | None) -> None:
        """Write into the file that the supervisor has made; `limit` is the recipe's hang_timeout_s."""
        self._set = limit or 0
        if path := os.environ.get(contract.VARIABLE):
            try:
                with Path(path).open("r+b") as file:
                    self._map = mmap.mmap(file.fileno(), contract.SIZE)
                self._server = _worker_server(contract.socket(path))
            except (OSError, ValueError) as error:
                say(f"this rank has no heartbeat: {error}")
        self.beat()

    def beat(self) -> None:
        """There is progress: a step, or a part of what else it does."""
        now = time.monotonic_ns()
        self._slowest[self._phase] = max(self._slowest[self._phase], (now - self._last) / 1e9)
        self._last = now
        contract.BEAT.pack_into(self._map, contract.BEAT_AT, self._step, self._phase, self.limit(), now)

    def step(self, taken: int) -> None:
        """So many steps are taken."""
        self._step = taken
        self.beat()

    def enter(self, phase: int) -> None:
        """What comes next is of this kind."""
        self.beat()
        self._phase = phase
        self.beat()

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """What is in it is of this kind."""
        before = self._phase
        self.enter(phase)
        yield
        self.enter(before)

    def limit(self) -> int:
        """Seconds until the next beat, at most."""
        slowest = self._slowest[self._phase]
        if self._phase != STEP:
            return int(max(LEAST[self._phase], _TIMES * slowest, self._set))
        return self._set or int(max(LEAST[STEP], _TIMES * slowest, _AGAIN * self._slowest[COMPILE]))


def _worker_server(path: str) -> object:
    """torch's own, on a socket in the node's own folder: it answers while Python does not."""
    try:
        from torch._C._distributed_c10d import _WorkerServer  # noqa: PLC0415  not in every torch

        return _WorkerServer(path)
    except (ImportError, RuntimeError, TypeError) as error:
        say(f"a hang will show no collectives: {error}")
        return None


heartbeat = Heartbeat()
