"""Reads the heartbeats of this node's ranks about once a second."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from dray.contract import heartbeat, run_folder
from dray.contract.node import proc_text
from dray.runner.plan import Plan

_BEAT = struct.Struct(f"<5q24x{len(heartbeat.MARKS)}q")  # PROGRAM, BEAT at BEAT_AT, and the marks at MARKS_AT
_WORK_S = 60.0  # seconds of a CPU: more than a rank uses that waits for an hour
_GAP = 5.0  # seconds between two looks after which this process itself was stopped, as by `scontrol suspend`


class Beat(NamedTuple):
    """The content of a rank's heartbeat file."""

    program: int
    """The program's process id; 0 before it runs, negative once it has ended."""
    step: int
    phase: int
    limit: int
    time: int
    """0 until the program has written its first heartbeat."""
    marks: tuple[int, ...]
    """How long the parts of its start took."""


class Late(NamedTuple):
    """A rank that has made no progress for longer than it may."""

    rank: int
    alone: bool
    """Whether this rank alone proves a hang: in a step all wait for it; in other phases others may still work."""
    seconds: float
    limit: float


class Heartbeats:
    """The heartbeats of these ranks. If the recipe sets a limit, a rank without one makes progress while its log
    grows."""

    def __init__(self, plan: Plan, size: Callable[[str], int]) -> None:
        """`size` is that of a log."""
        self.progress = 0.0  # when any of them was seen to make some
        self._plan = plan
        # dray's trainer says itself how long it may take, once it is loaded.
        self._limit = heartbeat.LEAST[heartbeat.START] if plan.recipe.train else plan.recipe.hang_timeout_s or 0
        self._size = size
        self._seen: dict[int, tuple[tuple[object, ...], float]] = {}
        self._looked = 0.0

    def look(self, now: float) -> Late | None:
        """The rank that is late the longest, if any is."""
        if now - self._looked > _GAP:
            self._seen.clear()  # all begin anew
        self._looked = now
        late = filter(None, [self._late(rank, now) for rank in self._plan.ranks])
        return max(late, key=lambda rank: (rank.alone, rank.seconds - rank.limit), default=None)

    def _late(self, rank: int, now: float) -> Late | None:
        beat = of(self._plan, rank)
        if beat.program <= 0 or not (beat.time or self._limit):
            return None
        signs: tuple[object, ...] = beat[1:]
        if not beat.time:
            signs = (self._size(f"{self._plan.folder}/{run_folder.rank_log(rank)}"),)
        elif beat.phase == heartbeat.START:  # what prepares data or reads weights knows of no heartbeat
            signs = (*signs, int(_cpu_s(beat.program) / _WORK_S))
        before, since = self._seen.get(rank, ((), now))
        if signs != before:
            since = self.progress = now
        self._seen[rank] = signs, since
        limit = beat.limit if beat.limit > 0 else self._limit
        if limit and now - since > limit:
            return Late(rank, beat.phase == heartbeat.STEP, now - since, limit)
        return None


def of(plan: Plan, rank: int) -> Beat:
    """The rank's last heartbeat, which any program may write; an empty one before it has a file."""
    data = b""
    with suppress(OSError), open(heartbeat.path(plan.scratch, rank), "rb", buffering=0) as file:
        data = file.read()
    program, step, phase, limit, at, *marks = _BEAT.unpack_from(data.ljust(heartbeat.SIZE, b"\0"))
    if not 0 <= phase < len(heartbeat.PHASES):
        phase = heartbeat.STEP
    return Beat(program, step, phase, limit, at, tuple(marks))


def _cpu_s(process: int) -> float:
    """CPU seconds that the process and its ended children have used."""
    times = proc_text(f"/proc/{process}/stat").rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
