"""How long each part of this node's start took; the first node collects the times of all in startup.json.

Ranks write their times into their heartbeat files on the node; nodes send theirs over the control connections. So the
shared disk gets one file, however many nodes and ranks there are.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from dray.contract import heartbeat, processes, run_folder, startup
from dray.runner import heartbeats, record

_EACH_S = 2.0  # between two looks at the heartbeats, and two writes
_now = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # which node.sh reads too
_LOADED = _now()  # as the runner begins


class StartTimings:
    """The times of one node, from the start of its runner to the first step of its ranks; without restarts."""

    def __init__(self, plan: Mapping[str, Any], me: int, began: float = _LOADED) -> None:
        started = os.environ.pop(startup.VARIABLE, "")
        self.parts = startup.before(started, processes.mark(os.getpid())[0], began)
        self._plan = plan
        self._me = me
        self._step = startup.step(started)
        self._nodes: list[dict[str, float]] = [{}] * len(plan["world"]["nodes"])
        self._since = began
        self._launched = 0.0
        self._looks_at = 0.0
        self._restarted = self._unwritten = False

    def lap(self, part: str) -> None:
        """Count the time since the last lap to this part."""
        if not self._launched:
            self.parts[part] = round(self.parts.get(part, 0.0) + _now() - self._since, 3)
            self._since = _now()

    def launched(self) -> None:
        """Note that the launcher starts."""
        self._restarted = self._launched > 0
        self._launched = self._launched or _now()

    def look(self, *, last: bool = False) -> dict[str, float]:
        """What another node tells the first one: its times so far, if there is a new one; mostly nothing.

        `last`: the launcher has ended.
        """
        if self._restarted or (_now() < self._looks_at and not last):
            return {}
        self._looks_at = _now() + _EACH_S
        parts = startup.clean({**self.parts, **self._of_ranks()})
        news = parts != self._nodes[self._me]
        if news:
            self.hear(self._me, parts)
        self.write()
        return parts if news and self._me else {}

    def hear(self, node: int, parts: dict[str, float]) -> None:
        """Store the times of a node."""
        self._nodes[node] = parts
        self._unwritten = True

    def write(self) -> None:
        """As the first node: write startup.json if there is news. With thousands of nodes one write has many news."""
        if self._unwritten and not self._me:
            self._unwritten = False
            text = json.dumps({"attempt": self._plan["attempt"], "step": self._step, "nodes": self._nodes})
            record.put(f"{self._plan['folder']}/{run_folder.STARTUP}", text)

    def _of_ranks(self) -> dict[str, float]:
        """The times of the last rank to finish its imports, for which the others waited."""
        each = self._plan["world"]["ranks_per_node"]
        scratch = self._plan["scratch"]
        marks = [heartbeats.of(scratch, self._me * each + local).marks for local in range(each)]
        if not all(rank[heartbeat.IMPORTED] for rank in marks):
            return {}
        parts = {name: mark / 1e9 for name, mark in zip(startup.RANK, max(marks), strict=True) if mark}
        return {**parts, startup.IMPORT: parts[startup.IMPORT] - self._launched}
