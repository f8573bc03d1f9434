"""Node reports of a run of many ranks: sent to the first node, instead of written as files to the shared disk.

Each node reports what it is, and how far its ranks came in the preflight. Only a failed preflight is judged.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from dray.contract import run_folder
from dray.runner import channel, node

MESSAGES = ("about", "preflight")
_TEXTS, _NUMBERS = ("node", "phase", "killed", "crashed"), ("order", "limit", "time")
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST = 1000  # letters of a text


class Gathered:
    """The reports of all nodes, on the first one."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.nodes: set[int] = set()  # that have told of their preflight
        self._failed: dict[int, dict[str, Any]] = {}  # all ranks of nodes on which one has
        self._plan, self._each = plan, plan["world"]["ranks_per_node"]
        self._file = -1

    @property
    def decided(self) -> bool:
        """Whether a rank has reported why the run cannot start."""
        return any("finding" in rank or "killed" in rank for rank in self._failed.values())

    def ranks(self) -> dict[int, dict[str, Any]]:
        """How far each rank came, of all nodes that have reported it."""
        all_of = (range(one * self._each, (one + 1) * self._each) for one in self.nodes)
        done = {rank: self._report(rank, {"phase": "done"}) for own in all_of for rank in own}
        return {**done, **self._failed}

    def hear(self, number: int, message: Mapping[str, Any]) -> None:
        """Take a message of MESSAGES. BrokenError: it is malformed."""
        if "about" in message:
            if not isinstance(message["about"], dict):
                raise channel.BrokenError("a malformed report of a node")
            self.keep({**message["about"], "node": number, "name": self._name(number)})
            return
        reports = message["preflight"]
        if not isinstance(reports, list) or not all(isinstance(report, dict) for report in reports):
            raise channel.BrokenError("a malformed report of a preflight")
        own = range(number * self._each, (number + 1) * self._each)
        known = {report["rank"]: report for report in reports if type(report.get("rank")) is int}
        if len(known) < len(reports) or not known.keys() <= {*own}:
            raise channel.BrokenError("a preflight report of another node's rank")
        self._failed |= {rank: self._report(rank, known[rank]) for rank in known}
        self.nodes.add(number)

    def keep(self, about: Mapping[str, Any]) -> None:
        """Append a line to nodes/nodes.jsonl, for the capsule; no run fails if it cannot be written."""
        target = f"{self._plan['folder']}/{run_folder.ALL_NODES}"
        try:
            if self._file < 0:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                self._file = os.open(target, _APPEND, 0o644)
            os.write(self._file, f"{json.dumps(about)}\n".encode())
        except OSError as error:
            print(f"dray: {target} cannot be written: {error}", file=sys.stderr, flush=True)

    def _name(self, number: int) -> str:
        return str(self._plan["world"]["nodes"][number]["name"])

    def _report(self, rank: int, told: Mapping[str, Any]) -> dict[str, Any]:
        report: dict[str, Any] = {"rank": rank, "order": -1, "limit": 0, "time": 0}
        report["expired"] = told.get("expired") is True
        report |= {name: str(told[name])[:_LONGEST] for name in _TEXTS if name in told}
        report |= {name: told[name] for name in _NUMBERS if type(told.get(name)) in (int, float)}
        if "finding" in told:
            report["finding"] = channel.finding(told["finding"])._asdict()
        return {"phase": "its start", **report, "node": self._name(rank // self._each)}


def gathered(plan: Mapping[str, Any], me: int) -> Gathered | None:
    """The reports, on the first node of a run of many ranks; else None."""
    return Gathered(plan) if not me and node.own(plan) else None
