"""The control connections: while launchers run, runners report stops, failures, restarts, start times and ended nodes.

Each runner keeps its connection to the first one from the rendezvous, which has proved both ends. If a connection ends
without a last message, its runner was killed or its node is gone.
"""

from __future__ import annotations

import _thread  # nobody waits for this thread, and threading's import is paid by every start
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from dray.contract import exit_codes, files, heartbeat, node_start, processes, run_folder
from dray.contract.findings import Finding
from dray.runner import heartbeats, records, say
from dray.runner.children import Children, exit_code
from dray.runner.connections import (
    Connection,
    Ended,
    Failed,
    Idle,
    Message,
    Report,
    Reports,
    Restart,
    Signal,
    StartTimes,
)
from dray.runner.hang import Hang
from dray.runner.plan import Plan

GRACE = 10.0  # seconds from asking the launcher to end to killing it
_HUNG_GRACE = 2.0  # its ranks have ended by then
_LOOK_S, _COLLECTING_S = 1.0, 0.1
_PART_S = 5.0  # from the last word to the close, for an end that does not read
_REST = 30.0  # seconds for all nodes to end once the run has failed: the grace, and what SIGKILL needs on a busy node
_FIRST_S = 5.0  # more for the first node's word
_FINAL = (exit_codes.UNFIT, exit_codes.CONFIG)  # the same ranks on the same nodes would end with it again
_FILE_LOOK_S = 1.0
_STALL_S = 5.0  # from one look to the next, after which the disk stalls
_LONGEST_STOP = 1 << 16  # bytes of the file by which a run is asked to end
_TIMES_S = 2.0  # between two looks at the heartbeats, and two writes
_now = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # which node.sh reads too
LOADED = _now()  # as the runner begins


class Control:
    """This node's side. On the first node `connections` lead to all other nodes; on the others, to the first one.

    What ends the run goes to the first node, and from there to all. A node whose launcher has ended kills what that has
    left behind, tells the first node that it is idle, and waits. The first node says whether all start again, and ends
    last: with the first node that fails srun kills all others, and with them the program that has mounted the image.
    """

    def __init__(
        self,
        plan: Plan,
        children: Children,
        connections: dict[int, Connection],
        timings: StartTimings,
    ) -> None:
        self._plan, self._me, self._children, self._timings = plan, plan.me, children, timings
        self._file_watch = FileWatch("" if plan.me else f"{plan.folder}/{run_folder.STOP}")
        self._open = connections
        self.asked = False
        """Whether all ranks are to save and end."""
        self.stopped = self._stops_now = False
        self.can_restart = True
        self.lost: dict[int, tuple[float, Finding]] = {}  # nodes, and when their connection ended
        self.preflight: dict[int, tuple[Report, ...]] = {}
        """On the first node: the last reports of each node's ranks; none of a node whose ranks have passed."""
        self._begin(Restart())
        for node, connection in connections.items():
            children.watch(connection.line.fileno(), lambda node=node: self._read(node))  # type: ignore[misc]

    def _begin(self, start: Restart) -> None:
        """Begin a start of all ranks: nothing is known of them yet."""
        self.start = start
        self.cause: Finding | None = None
        self.saved = False
        """Whether the cause is that ranks have saved and ended, as they were asked to."""
        self._idle: set[int] = set()
        watched = self._plan.recipe.hang_timeout_s != 0
        self.hang = Hang(self._plan, start.number, self._file_watch.size, self._tell_all) if watched else None

    def lead(self, explain: Callable[[int], Finding]) -> int:
        """Wait until the launchers of all nodes, and their processes, have ended; return this node's exit code.

        `explain` turns the launcher's exit code into the reason why this node has failed.
        """
        start, code, deadline, idle = self.start, 0, 0.0, not self._me
        while self.start is start and (self._children.running or self._waits()):
            if self._ending and not (self.stopped and self._children.running):
                deadline = deadline or time.monotonic() + _REST + _FIRST_S * bool(self._me)
                if time.monotonic() > deadline:
                    break
            signals, ended = self._children.wait(_COLLECTING_S if self._hangs else _LOOK_S)
            self._obey(self._file_watch.stop_lines)
            for number in signals:
                self.heard(number)
            self._watch()
            self._tell_times(last=not self._children.running)
            for code in ended.values():
                if code and not self._ending and not self._hangs:
                    self._failed(explain(code))
            if not idle and not self._children.running and not self._hangs:
                idle = True
                if self.stopped:  # as in Runner.leave, but before the others hear of it
                    self._children.end(GRACE)
                self.can_restart = self._children.sweep() and self.can_restart
                self._tell_all(Idle(self.can_restart, self.cause if self.saved else None))
        if self.saved and self._me:  # the first node says it for all: srun ends the others with the first that fails
            return exit_codes.DONE
        return self.cause.code if self.cause else exit_code(code)

    @property
    def _ending(self) -> bool:
        """Whether the ranks of all nodes are to end now. After a stop, as after a request, they may still save."""
        return self.stopped or (self.cause is not None and not self.saved and not self._hangs)

    @property
    def _hangs(self) -> bool:
        """Whether the run hangs, and the first node has not yet named the cause."""
        return self.hang is not None and self.hang.begun is not None and not self.stopped

    def _waits(self) -> bool:
        """Whether this node waits for others."""
        if self._me:
            return bool(self._open)
        return self._hangs or not self._idle.issuperset(self._open)

    def _watch(self) -> None:
        """Watch whether the ranks make progress; if they hang, end them with the reason."""
        if self.hang is None or self._ending:
            return
        self.hang.look()
        self.cause = self.cause or self.hang.begun
        if found := self.hang.named:
            say(f"the run ends: {found}")
            self.fail(found)
            self._children.end(_HUNG_GRACE)

    def _tell_times(self, *, last: bool) -> None:
        if not self.start.number and (parts := self._timings.look(last=last)):  # no restart is part of them
            self._tell_all(StartTimes(parts))

    def ask(self) -> None:
        """Ask the ranks of all nodes to save and end; those of a start that has begun since are asked too."""
        self._children.ask()
        if not self.asked:
            self.asked, self.can_restart = True, False
            say("the ranks are asked to save and end")
            self._tell_all(Signal(signal.SIGUSR1))

    def heard(self, number: int) -> None:
        """Handle a signal to this node, for all nodes."""
        if number == signal.SIGUSR1:
            self.ask()
        else:
            self._stop(number)

    def _obey(self, lines: list[bytes]) -> None:
        """Do what the stop file asks for, if there is something in it."""
        if run_folder.NOW.encode() in lines:
            self._stop(signal.SIGKILL)
        elif lines:
            self.ask()

    def _stop(self, number: int) -> None:
        """End the ranks of all nodes: they may save as long as Slurm lets them; with SIGKILL, only within the grace."""
        now = number == signal.SIGKILL
        if self._stops_now or (self.stopped and not now):
            return
        self.stopped, self._stops_now, self.can_restart = True, now, False
        if now:
            self._children.end(GRACE)
        else:
            self._children.tell(number)
        self._tell_all(Signal(number))

    def _failed(self, found: Finding) -> None:
        """Tell all nodes how this one's ranks ended; ranks that were asked to save and end with 75 are well."""
        if not self.asked or found.code != exit_codes.RETRY:
            self.fail(found)
        elif not self.cause:
            self.cause, self.saved = found, True

    def fail(self, finding: Finding) -> None:
        """Tell all nodes why the run fails."""
        self.cause, self.saved = finding, False
        self.hang = None  # what waits for ranks that have failed does not hang
        self._tell_all(Failed(finding))

    def end(self, finding: Finding) -> None:
        """End the ranks of all nodes, unless they end already: they would wait for others for ever."""
        if not self._ending:
            say(f"this node's ranks are stopped: {finding}")
            self._children.end(GRACE)
            self.fail(finding)

    def report_preflight(self, reports: tuple[Report, ...]) -> None:
        """Report to the first node how far this node's ranks have come; nothing if all have passed."""
        self.preflight[self._me] = reports
        if self._me:
            self._tell_all(Reports(reports))

    def may_restart(self) -> bool:
        """As the first node: whether all ranks may be started again."""
        world = self._plan.world
        if not self.can_restart or not self.cause or self.cause.code in _FINAL:
            return False
        others = len(world.nodes) - 1
        return self.start.number < world.max_restarts and len(self._open) == len(self._idle) == others

    def restart(self, port: int) -> None:
        """As the first node: begin the next start on all nodes, with the store at this port."""
        self._begin(Restart(self.start.number + 1, port, self.cause))
        self._tell_all(self.start)

    def close(self, seconds: float = _PART_S) -> None:
        """Tell the others that this node has ended by itself; wait so long until they have read it.

        The kernel resets a connection that is closed with unread data, and drops the last message.
        """
        self._tell_times(last=True)
        self._tell_all(Ended())
        deadline = time.monotonic() + seconds
        self.stopped = True  # no node is lost any more
        while self._open and (left := deadline - time.monotonic()) > 0:
            self._children.look(left)
        for node in list(self._open):
            self._close(node)

    def _read(self, node: int) -> None:
        try:
            for message in self._open[node].receive():
                if node in self._open:
                    self._hear(node, message)
        except OSError as error:
            self._lost(node, str(error))

    def _hear(self, node: int, message: Message) -> None:
        match message:
            case Signal(number):
                self.heard(number)
            case Failed(finding):
                self.end(finding)
            case Restart():
                self._begin(message)
            case Ended():
                self._close(node)
            case Idle(can_restart, saved):
                self.can_restart = self.can_restart and can_restart
                self._idle.add(node)
                if saved and not self.cause:  # the first node's own ranks may have ended with 0
                    self.cause, self.saved = saved, True
            case StartTimes(parts):
                self._timings.nodes[node] = parts
            case Reports(reports):
                self.preflight[node] = reports
            case _ if self.hang and not self._ending:
                self.hang.hear(message)
                self.cause = self.cause or self.hang.begun

    def _lost(self, node: int, why: str) -> None:
        self._close(node)
        if self.stopped:  # without that node's ranks none can save; after KillWait Slurm kills the batch script as well
            self._children.end(GRACE)
            return
        name = self._plan.names[node]
        finding = Finding(
            f"node {node} ({name}) is gone",
            wanted="a last message from the node's runner",
            found=why,
            fix="start the run again; see that node's log, and what Slurm says: scontrol show node NAME",
            code=exit_codes.RETRY,
            node=name,
        )
        # Ranks of other nodes may have died of it already, and been taken for the cause.
        self.lost[node] = time.time(), finding
        if not self.cause:
            self.end(finding)

    def _close(self, node: int) -> None:
        if node == 0:  # it ends last, unless its image is gone: no rank of this node can go on, or save, without it
            self._children.end(GRACE)
        connection = self._open.pop(node)
        self._children.forget(connection.line.fileno())
        connection.line.close()

    def _tell_all(self, message: Message) -> None:
        for connection in self._open.values():
            with suppress(OSError):  # it is gone, which is read next
                connection.send(message)


class FileWatch:
    """The last look at the file by which a run is asked to end, and at the sizes of others.

    A thread looks: while the shared disk stalls, signals, messages and hangs are still seen.
    """

    def __init__(self, stop: str = "") -> None:
        self.stop_lines: list[bytes] = []
        """The lines of the file `stop`; none without one."""
        self._stop = stop
        self._sizes: dict[str, int] = {}
        self._looked = time.monotonic()
        _thread.start_new_thread(self._look, ())

    def size(self, path: str) -> int:
        """The size of this file when it was last seen, 0 before that.

        While the disk stalls it may grow unseen: another number each time.
        """
        size = self._sizes.setdefault(path, 0)
        return size if time.monotonic() < self._looked + _STALL_S else -time.monotonic_ns()

    def _look(self) -> None:
        while True:
            with suppress(OSError):  # a disk that does not answer asks for nothing
                self.stop_lines = files.read(self._stop, limit=_LONGEST_STOP).splitlines()
            for path in list(self._sizes):
                with suppress(OSError):
                    self._sizes[path] = os.stat(path).st_size
            self._looked = time.monotonic()
            time.sleep(_FILE_LOOK_S)


class StartTimings:
    """How long each part of this node's start took, from that of its runner to the first step of its ranks.

    The first node collects the times of all in startup.json. Ranks write theirs into their heartbeat files on the node,
    and nodes send theirs over the control connections: the shared disk gets one file, however many ranks there are.
    """

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
        self._looks_at = _now() + _TIMES_S
        parts = node_start.valid_parts({**self.parts, **self._of_ranks()})
        me = self._plan.me
        if parts != self.nodes[me]:
            self.nodes[me] = parts
            if me:
                return parts
        if not me and self.nodes != self._written:  # with thousands of nodes one write has many news
            self._written = [*self.nodes]
            text = json.dumps({"attempt": self._plan.attempt, "nodes": self.nodes})
            records.put(f"{self._plan.folder}/{run_folder.STARTUP}", text)
        return {}

    def _of_ranks(self) -> dict[str, float]:
        """The times of the last rank to finish its imports, for which the others waited."""
        marks = [heartbeats.of(self._plan, rank).marks for rank in self._plan.ranks]
        if not all(rank[heartbeat.IMPORTED] for rank in marks):
            return {}
        parts = {name: mark / 1e9 for name, mark in zip(node_start.RANK, max(marks), strict=True) if mark}
        return {**parts, node_start.IMPORT: parts[node_start.IMPORT] - self._launched}
