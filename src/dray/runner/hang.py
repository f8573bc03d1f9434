"""Finds a hang by heartbeats: each node saves what its ranks do, and the first node names the rank to blame.

Each node reads the heartbeats of its own ranks, and tells the first one that they make progress, or which rank is late.
In a step one late rank is enough. In any other phase the run hangs only if no rank of any node makes progress: the
others may wait for one that tokenizes, or loads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dray.contract import exit_codes, heartbeat, run_folder
from dray.contract.findings import Finding
from dray.runner import record, stack_groups
from dray.runner.culprit import Seen, culprit
from dray.runner.heartbeats import Heartbeats, Late
from dray.runner.protocol import Hung, Message, Progress, Stacks

if TYPE_CHECKING:
    from threading import Thread

_LOOK_S, _TELL_S, _LATE_S = 1.0, 5.0, 2.0  # seconds between looks, and between messages to the first node
_EVIDENCE_S = 7.5  # for all nodes; what has not come by then is not there


class Hang:
    """The watch over one start of the ranks. A node sends what `look` and `hear` return to the first node; the first
    node sends it to all others."""

    def __init__(self, plan: Mapping[str, Any], me: int, restart: int, size: Callable[[str], int]) -> None:
        world, now = plan["world"], time.monotonic()
        self.open = False  # from the moment at which the run hangs until it is known why
        self.begun: Finding | None = None
        self.named: Finding | None = None
        self.since = 0.0
        self._plan, self._me, self._restart = plan, me, restart
        self._names, self._each = [node["name"] for node in world["nodes"]], world["ranks_per_node"]
        recipe = plan.get("recipe", {})
        # dray's trainer says itself how long it may take, once it is loaded.
        limit = heartbeat.LEAST[heartbeat.START] if recipe.get("train") else recipe.get("hang_timeout_s")
        self._beats = Heartbeats(plan["folder"], plan["scratch"], self._ranks(me), limit, now, size)
        self._progress = self._told = now
        self._looks_at = self._tells_at = self._late_at = now
        self._late: Late | None = None
        self._deadline = 0.0
        self._threads: list[Thread] = []
        self._seen: dict[int, Seen] = {}
        self._answered: set[int] = set()

    def look(self) -> list[Message]:
        """The messages to send: about every second, and at once after a hang."""
        now = time.monotonic()
        if self.open:
            return self._collected(now)
        if now < self._looks_at:
            return []
        self._looks_at = now + _LOOK_S
        late = self._beats.look(now)
        self._progress = max(self._progress, self._beats.progress)
        if not self._me:
            hung = self._judge(late, now) if late else None
            return [hung] if hung else []
        messages: list[Message] = []
        if self._progress > self._told and now >= self._tells_at:
            self._told, self._tells_at = self._progress, now + _TELL_S
            messages.append(Progress(round(now - self._progress, 3)))
        if late and now >= self._late_at:
            self._late_at = now + _LATE_S
            messages.append(late)
        return messages

    def hear(self, node: int, message: Message) -> Hung | None:
        """Take another node's message; return what the first node tells all others of it."""
        now = time.monotonic()
        match message:
            case Hung(finding) if not self.open:
                self._begin(finding, now)
            case Progress(ago):
                self._progress = max(self._progress, now - ago)
            case Late() if not self.open:
                return self._judge(message, now)
            case Stacks(groups):
                self._seen |= stack_groups.each(groups)
                self._answered.add(node)
        return None

    def _ranks(self, node: int) -> range:
        return range(node * self._each, (node + 1) * self._each)

    def _node(self, rank: int) -> str:
        return str(self._names[rank // self._each]) if 0 <= rank < self._each * len(self._names) else ""

    def _judge(self, late: Late, now: float) -> Hung | None:
        """As the first node, decide whether this late rank proves a hang."""
        if not late.alone and now - self._progress <= late.limit:
            return None
        self._late = late
        name = self._node(late.rank)
        problem = f"hang: rank {late.rank} on {name} has made no progress for {_ago(late)}"
        finding = Finding(problem, code=exit_codes.RETRY, node=name, rank=late.rank)
        self._begin(finding, now)
        return Hung(finding)

    def _begin(self, finding: Finding, now: float) -> None:
        """Save what this node's ranks do; each has a thread, since one that is stopped answers nothing."""
        from threading import Thread  # noqa: PLC0415  few runs hang, and all of it costs 10 ms

        from dray.runner import stacks  # noqa: PLC0415

        self.begun, self.open, self.since, self._deadline = finding, True, time.time(), now + _EVIDENCE_S
        print(f"dray: {finding.problem}; all nodes save what their ranks do", file=sys.stderr, flush=True)

        def save(at: stacks.Place) -> None:
            self._seen[at.rank] = stacks.save(at, self._beats.of(at.rank), now)

        places = stacks.places(self._plan, self._restart, self._names[self._me], self._ranks(self._me))
        self._threads = [Thread(target=save, args=(at,), daemon=True) for at in places]
        for thread in self._threads:
            thread.start()

    def _collected(self, now: float) -> list[Message]:
        """This node's report, once all its ranks are saved; the first node names the rank once all have reported."""
        if self._me not in self._answered and not any(thread.is_alive() for thread in self._threads):
            self._answered.add(self._me)
            if self._me:
                return [Stacks(stack_groups.grouped(self._seen.values()))]
        if not self._me and (len(self._answered) == len(self._names) or now > self._deadline):
            self._name()
        return []

    def _name(self) -> None:
        """Name the rank to blame: the finding, and a record older than those of the ranks that dray then ended."""
        assert self._late is not None
        ranks = range(self._each * len(self._names))
        seen = [self._seen.get(rank) or Seen(rank, self._node(rank), state="unseen") for rank in ranks]
        found, what = culprit(seen)
        who = f"rank {found.rank} on {found.node} " if found else ""
        problem = f"hang: {who}{what}; rank {self._late.rank} made no progress for {_ago(self._late)}"
        folder = f"{self._plan['folder']}/{run_folder.hang(self._restart)}"
        where = f"{folder}/rank-{found.rank if found else self._late.rank}.txt"
        fix = f"see the stacks of all ranks in {folder}; docs/survive.md"
        self.named = Finding(
            problem, where=where, fix=fix, code=exit_codes.RETRY,
            node=found.node if found else "", rank=found.rank if found else None,
        )  # fmt: skip
        record.lines(f"{folder}/seen.jsonl", stack_groups.lines(seen))
        self.write_record(self.named, found.frames if found else ())
        self.open = False

    def write_record(self, finding: Finding, frames: tuple[str, ...] = ()) -> None:
        """Write failures/hang.json."""
        record.write(
            self._plan["folder"], "hang", node=finding.node, rank=finding.rank, code=finding.code, why=finding.problem,
            log=finding.where, last_lines=list(frames), time=self.since,
        )  # fmt: skip


def _ago(late: Late) -> str:
    return f"{late.seconds:.0f} s (limit {late.limit:.0f} s)"
