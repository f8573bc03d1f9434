"""Finds a hang by heartbeats: each node saves what its ranks do, and the first node names the rank to blame.

Each node reads the heartbeats of its own ranks, and tells the first one that they make progress, or which rank is late.
In a step one late rank is enough. In any other phase the run hangs only if no rank of any node makes progress: the
others may wait for one that tokenizes, or loads.
"""

from __future__ import annotations

import _thread  # nobody waits for these threads
import time
from collections.abc import Callable

from dray.contract import exit_codes, run_folder
from dray.contract.findings import Finding
from dray.runner import failure_record
from dray.runner.culprit import Seen, culprit
from dray.runner.heartbeats import Heartbeats, Late
from dray.runner.log import say
from dray.runner.plan import Plan
from dray.runner.protocol import Hung, Message, Progress

_LOOK_S, _TELL_S = 1.0, 5.0  # seconds between looks, and between two messages of progress
_EVIDENCE_S = 7.5  # for all nodes; what has not come by then is not there


class Hang:
    """The watch over one start of the ranks. `tell` sends a message to the first node; there, to all others."""

    def __init__(self, plan: Plan, restart: int, size: Callable[[str], int], tell: Callable[[Message], None]) -> None:
        self.begun: Finding | None = None
        self.named: Finding | None = None
        self.since = 0.0
        self._plan, self._tell = plan, tell
        self._folder = f"{plan.folder}/{run_folder.hang(restart)}"
        self._nodes = [name for name in plan.names for _ in plan.ranks]  # of each rank
        self._beats = Heartbeats(plan, size)
        self._progress = self._looks_at = self._tells_at = self._deadline = time.monotonic()
        self._seen: list[Seen] = []
        self._reported = False

    def look(self) -> None:
        """Look at the ranks about every second, and at once after a hang."""
        now = time.monotonic()
        if self.begun:
            self._collect(now)
        if self.begun or now < self._looks_at:
            return
        self._looks_at = now + _LOOK_S
        late = self._beats.look(now)
        self._progress = max(self._progress, self._beats.progress)
        if late:
            self._judge(late, now)
        if self._plan.me and now >= self._tells_at and now - self._progress <= _TELL_S:
            self._tells_at = now + _TELL_S
            self._tell(Progress(now - self._progress))

    def hear(self, message: Message) -> None:
        """Take another node's message."""
        now = time.monotonic()
        match message:
            case Hung(finding) if not self.begun:
                self._begin(finding, now)
            case Progress(ago):
                self._progress = max(self._progress, now - ago)
            case Late() if not self.begun:
                self._judge(message, now)
            case Seen(rank):
                self._seen[rank] = message

    def _judge(self, late: Late, now: float) -> None:
        """Have the first node decide whether this late rank proves a hang."""
        if self._plan.me:
            self._tell(late)
            return
        if not late.alone and now - self._progress <= late.limit:
            return
        node = self._nodes[late.rank]
        limit = f"{late.seconds:.0f} s (limit {late.limit:.0f} s)"
        finding = Finding(
            f"hang: rank {late.rank} on {node} has made no progress for {limit}",
            code=exit_codes.RETRY,
            node=node,
            rank=late.rank,
        )
        self._begin(finding, now)
        self._tell(Hung(finding))

    def _begin(self, finding: Finding, now: float) -> None:
        """Save what this node's ranks do; each has a thread, since one that is stopped answers nothing."""
        from dray.runner import stacks  # noqa: PLC0415  few runs hang

        self.begun = finding
        self.since = time.time()
        self._deadline = now + _EVIDENCE_S
        say(f"{finding.problem}; all nodes save what their ranks do")
        self._seen = [Seen(rank, node, state="unseen") for rank, node in enumerate(self._nodes)]

        for rank in self._plan.ranks:
            file = f"{self._folder}/rank-{rank}.txt"
            _thread.start_new_thread(stacks.save, (self._seen, rank, self._plan, file, now))

    def _collect(self, now: float) -> None:
        """Tell what was seen of this node's ranks, once all are saved; the first node names the culprit."""
        seen = [self._seen[rank] for rank in self._plan.ranks] if self._plan.me else self._seen
        complete = all(rank.state != "unseen" for rank in seen)
        if not self._plan.me and (complete or now > self._deadline):
            self._name()
        elif complete and not self._reported:
            self._reported = True
            for rank in seen:
                self._tell(rank)

    def _name(self) -> None:
        """Name the rank to blame: the finding, and a record older than those of the ranks that dray then ended."""
        assert self.begun is not None
        blamed, what = culprit(self._seen)
        shown = blamed or Seen(self.begun.rank or 0)
        who = f"rank {shown.rank} on {shown.node} " if blamed else ""
        self.named = self.begun._replace(
            problem=f"hang: {who}{what}; {self.begun.problem.removeprefix('hang: ')}",
            where=f"{self._folder}/rank-{shown.rank}.txt",
            fix=f"see the stacks of all ranks in {self._folder}; docs/survive.md",
            node=shown.node,
            rank=shown.rank if blamed else None,
        )
        self.write_record(self.named, shown.frames)

    def write_record(self, finding: Finding, frames: tuple[str, ...] = ()) -> None:
        """Write failures/hang.json."""
        folder, why = self._plan.folder, finding.problem
        failure_record.write(folder, "hang", finding, finding.where, why=why, last_lines=[*frames], time=self.since)
