"""How long each part of this node's start took; the first node collects the times of all in startup.json.

Ranks write their times into their heartbeat files on the node; nodes send theirs over the control connections. So the
shared disk gets one file, however many nodes and ranks there are.
"""

from __future__ import annotations

import functools
import json
import os
import time

from dray.contract import heartbeat, node_start, processes, run_folder
from dray.runner import failure_record, heartbeats
from dray.runner.plan import Plan

_EACH_S = 2.0  # between two looks at the heartbeats, and two writes
_now = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # which node.sh reads too
LOADED = _now()  # as the runner begins


class StartTimings:
    """The times of one node, from the start of its runner to the first step of its ranks."""

    def __init__(self, plan: Plan) -> None:
        started = os.environ.pop(node_start.STARTED, "")
        self.parts = node_start.parts_before_runner(started, processes.mark(os.getpid())[0], LOADED)
        self._plan = plan
        self.nodes: list[dict[str, float]] = [{} for _ in plan.world.nodes]
        """The times of each node; other nodes have their own alone."""
        self._written = [*self.nodes]
        self._since = LOADED
        self._launched = 0.0
        self._looks_at = 0.0

    def lap(self, part: str) -> None:
        """Count the time since the last lap to this part."""
        self.parts[part] = round(self.parts.get(part, 0.0) + _now() - self._since, 3)
        self._since = _now()

    def launched(self) -> None:
        """Note that the launcher starts."""
        self._launched = _now()

    def look(self, *, last: bool = False) -> dict[str, float]:
        """What another node tells the first one: its times so far, if there is a new one; mostly nothing.

        The first node writes startup.json if there is news.
        `last`: the launcher has ended.
        """
        if _now() < self._looks_at and not last:
            return {}
        self._looks_at = _now() + _EACH_S
        parts = node_start.valid_parts({**self.parts, **self._of_ranks()})
        me = self._plan.me
        if parts != self.nodes[me]:
            self.nodes[me] = parts
            if me:
                return parts
        if not me and self.nodes != self._written:  # with thousands of nodes one write has many news
            self._written = [*self.nodes]
            text = json.dumps({"attempt": self._plan.attempt, "nodes": self.nodes})
            failure_record.put(f"{self._plan.folder}/{run_folder.STARTUP}", text)
        return {}

    def _of_ranks(self) -> dict[str, float]:
        """The times of the last rank to finish its imports, for which the others waited."""
        marks = [heartbeats.of(self._plan, rank).marks for rank in self._plan.ranks]
        if not all(rank[heartbeat.IMPORTED] for rank in marks):
            return {}
        parts = {name: mark / 1e9 for name, mark in zip(node_start.RANK, max(marks), strict=True) if mark}
        return {**parts, node_start.IMPORT: parts[node_start.IMPORT] - self._launched}
