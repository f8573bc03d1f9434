"""Reads the heartbeats of this node's ranks about once a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from dray.contract import heartbeat, run_folder

_MOST = 1 << 53
_WORK_S = 60.0  # seconds of a CPU: more than a rank uses that waits for an hour
_GAP = 5.0  # seconds between two looks after which this process itself was stopped, as by `scontrol suspend`


class Beat(NamedTuple):
    """The content of a rank's heartbeat file."""

    program: int = 0
    """The program's process id; 0 before it runs, negative once it has ended."""
    step: int = 0
    phase: int = heartbeat.START
    limit: int = 0
    time: int = 0
    """0 until the program has written its first heartbeat."""


class Late(NamedTuple):
    """A rank that has made no progress for longer than it may."""

    rank: int
    step: int
    phase: int
    seconds: float
    limit: float

    @property
    def alone(self) -> bool:
        """Whether this rank alone proves a hang: in a step all wait for it; in other phases others may still work."""
        return self.phase == heartbeat.STEP


class Heartbeats:
    """The heartbeats of these ranks. If the recipe sets a limit, a rank without one makes progress while its log
    grows."""

    def __init__(
        self, folder: str, scratch: str, ranks: range, limit: int | None, now: float, size: Callable[[str], int]
    ) -> None:
        self.ranks, self.limit = ranks, limit
        self.progress = now  # when any of them was seen to make some
        self._folder, self._scratch, self._size = folder, scratch, size
        self._seen: dict[int, tuple[int, ...]] = {}
        self._changed: dict[int, float] = {}
        self._looked = now
        for rank in ranks:  # those of the start before
            for left in (path := heartbeat.path(scratch, rank), heartbeat.socket(path)):
                if os.path.lexists(left):
                    os.unlink(left)

    def of(self, rank: int) -> Beat:
        """The rank's last heartbeat; an empty one if it has no file yet."""
        data = read(self._scratch, rank)
        step, phase, limit, time = heartbeat.BEAT.unpack_from(data, heartbeat.BEAT_AT)
        phase = phase if 0 <= phase < len(heartbeat.PHASES) else heartbeat.STEP
        step, limit = (min(max(0, number), _MOST) for number in (step, limit))  # any program may write it
        return Beat(heartbeat.PROGRAM.unpack_from(data)[0], step, phase, limit, time)

    def look(self, now: float) -> Late | None:
        """The rank that is late the longest, if any is."""
        if now - self._looked > _GAP:
            self._changed = {rank: at + now - self._looked for rank, at in self._changed.items()}
            self.progress += now - self._looked
        self._looked = now
        late = [found for rank in self.ranks if (found := self._late(rank, now))]
        return max(late, key=lambda one: (one.alone, one.seconds - one.limit), default=None)

    def _late(self, rank: int, now: float) -> Late | None:
        beat = self.of(rank)
        if beat.program <= 0 or not (beat.time or self.limit):
            return None
        signs = beat[1:] if beat.time else (self._size(f"{self._folder}/{run_folder.rank_log(rank)}"),)
        if beat.time and beat.phase == heartbeat.START:  # what prepares data or reads weights knows of no heartbeat
            signs = (*signs, int(_cpu_s(beat.program) / _WORK_S))
        if signs != self._seen.get(rank):
            self._seen[rank], self._changed[rank] = signs, now
            self.progress = now
        limit, seconds = beat.limit or self.limit, now - self._changed[rank]
        if not limit or seconds <= limit:
            return None
        return Late(rank, beat.step, beat.phase, round(seconds, 1), limit)


def read(scratch: str, rank: int) -> bytes:
    """The content of this rank's file; zeros before there is one, or if it is none."""
    try:
        with open(heartbeat.path(scratch, rank), "rb", buffering=0) as file:
            data = file.read(heartbeat.SIZE)
    except OSError:
        data = b""
    return data if len(data) == heartbeat.SIZE else bytes(heartbeat.SIZE)


def program(scratch: str, rank: int) -> int:
    """The process id of this rank's program; 0 before it runs, negative once it has ended."""
    return int(heartbeat.PROGRAM.unpack_from(read(scratch, rank))[0])


def _cpu_s(process: int) -> float:
    """CPU seconds that the process and its ended children have used."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
