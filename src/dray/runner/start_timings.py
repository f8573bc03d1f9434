"""How long each part of this node's start took; the first node collects the times of all in startup.json.

Ranks write their times into their heartbeat files on the node; nodes send theirs over the control connections. So the
shared disk gets one file, however many nodes and ranks there are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from dray.contract import files, heartbeat, run_folder, startup
from dray.runner import heartbeats

_EACH_S = 1.0  # between two looks at the heartbeats
_WRITES_S = 2.0  # between two writes
_NS = 1_000_000_000
_LOADED = time.clock_gettime(time.CLOCK_BOOTTIME)  # as the runner begins


def now() -> float:
    """Seconds by the clock that node.sh reads too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StartTimings:
    """The times of one node, from the start of its runner to the first step of its ranks; without restarts."""

    def __init__(self, plan: Mapping[str, Any], me: int, began: float = _LOADED) -> None:
        world, told = plan["world"], os.environ.pop(startup.VARIABLE, "")
        self.parts = startup.before(told, _boot_id(), began)
        self._path = f"{plan['folder']}/{run_folder.STARTUP}"
        self._head = {"attempt": plan["attempt"], "step": startup.step(told)}
        self._scratch, self._me = plan["scratch"], me
        first = me * world["ranks_per_node"]
        trains = plan.get("recipe", {}).get("train")  # of a program of the user's own nobody knows its steps
        self._ranks = range(first, first + world["ranks_per_node"] if trains else first)
        self._nodes: list[dict[str, float] | None] = [None] * len(world["nodes"])
        self._since, self._launched = began, 0.0
        self._looks_at = self._writes_at = 0.0
        self._unwritten = self._told = self._whole = False

    def lap(self, part: str) -> None:
        """Count the time since the last lap to this part."""
        if not self._launched:
            at = now()
            self.parts[part] = round(self.parts.get(part, 0.0) + at - self._since, 3)
            self._since = at

    def launched(self) -> None:
        """Note that the launcher starts."""
        self._launched = self._launched or now()

    def look(self, *, last: bool = False) -> dict[str, float]:
        """What another node tells the first one: its times before the launch, then all of them; mostly nothing.

        `last`: the launcher has ended.
        """
        news: dict[str, float] = {}
        if not self._whole and (last or time.monotonic() >= self._looks_at):
            self._looks_at = time.monotonic() + _EACH_S
            ranks, whole = self._of_ranks()
            self._whole = whole or last
            if self._whole or not self._told:
                news, self._told = startup.clean({**self.parts, **ranks}), True
        if self._me:
            return news
        if news:
            self.hear(0, news)
        if time.monotonic() >= self._writes_at:
            self.write()
        return {}

    def hear(self, node: int, parts: dict[str, float]) -> None:
        """Store the times of a node."""
        self._nodes[node], self._unwritten = parts, True

    def write(self) -> None:
        """As the first node: write startup.json if there is news. With thousands of nodes one write has many news."""
        if not self._unwritten:
            return
        self._unwritten, self._writes_at = False, time.monotonic() + _WRITES_S
        try:
            files.write_atomic(self._path, json.dumps({**self._head, "nodes": self._nodes}))
        except OSError as error:  # no run ends for it
            print(f"dray: {run_folder.STARTUP} cannot be written: {error.strerror}", flush=True)

    def _of_ranks(self) -> tuple[dict[str, float], bool]:
        """The times of the last rank to finish its imports, for which the others waited; whether all are at step 1."""
        told = [self._marks(rank) for rank in self._ranks]
        last = max(told, key=lambda marks: marks[heartbeat.IMPORTED], default=None)
        if last is None or not all(marks[heartbeat.IMPORTED] for marks in told):
            return {}, last is None
        parts = {name: last[mark] / _NS for mark, name in enumerate(startup.RANK) if last[mark]}
        parts[startup.IMPORT] -= self._launched
        return parts, all(marks[heartbeat.FIRST_STEP] for marks in told)

    def _marks(self, rank: int) -> list[int]:
        """The times that the rank has written so far; any program may write the file."""
        data, size = heartbeats.read(self._scratch, rank), heartbeat.MARK.size
        return [heartbeat.MARK.unpack_from(data, heartbeat.MARKS_AT + mark * size)[0] for mark in heartbeat.MARKS]


def _boot_id() -> str:
    try:
        with open(startup.BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
