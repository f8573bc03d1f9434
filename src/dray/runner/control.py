"""The control connections: while launchers run, runners report stops, failures, restarts and ended nodes.

Each runner keeps its connection to the first one from the rendezvous, which has proved both ends. If a connection ends
without a last message, its runner was killed or its node is gone.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dray.contract import exit_codes, run_folder
from dray.contract.findings import Finding
from dray.runner.children import Children, exit_code
from dray.runner.file_watch import FileWatch
from dray.runner.hang import Hang
from dray.runner.hub import Connection
from dray.runner.protocol import (
    Ended,
    Failed,
    Idle,
    Message,
    Reports,
    ReportsWanted,
    Restart,
    Save,
    Saved,
    StartTimes,
    Stop,
)
from dray.runner.start_timings import StartTimings

_STOPS = (signal.SIGTERM, signal.SIGINT)
_GRACE = 10.0  # seconds from asking the launcher to end to killing it
_HUNG_GRACE = 2.0  # its ranks have ended by then
_LOOK_S, _COLLECTING_S = 1.0, 0.1
_KILLING_S = 10.0  # from SIGKILL to the end of what can end
_PART_S = 5.0  # from the last word to the close, for an end that does not read
_REST = 30.0  # seconds for all nodes to end once the run has failed: the grace, and what SIGKILL needs on a busy node
_FIRST_S = 5.0  # more for the first node's word
_CALLING_S = 0.5  # for all nodes to leave for the next rendezvous; one that stands still holds up no other
_FINAL = (exit_codes.UNFIT, exit_codes.CONFIG)  # the same ranks on the same nodes would end with it again


class Control:
    """This node's side. On the first node `channels` lead to all other nodes; on the others, to the first one.

    A node whose launcher has ended kills what that has left behind, tells the first node that it is idle, and waits.
    The first node says whether all start again, and ends last. When one node fails, srun kills all others at once, and
    with them the program that has mounted the image: a rank that still runs then may outlive the job.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        me: int,
        children: Children,
        channels: Mapping[int, Connection],
        start: Restart,
        watch: FileWatch,
        timings: StartTimings,
    ) -> None:
        world, watched = plan["world"], plan.get("recipe", {}).get("hang_timeout_s") != 0
        self.cause: Finding | None = None
        self.asked = self.saved = False  # whether it is to save and end, and whether ranks have done so
        self.stopped = False
        self._stops_now = False
        self.lost: dict[int, tuple[float, Finding]] = {}  # nodes, and when their connection ended
        self.next: Restart | None = None
        self._left = world["max_restarts"] - start.number
        self._idle: set[int] = set()
        self.preflight: dict[int, list[dict[str, Any]]] = {}
        """On the first node: the last reports of each node's ranks; none of a node whose ranks have passed."""
        self.report_wanted = False
        self._file_watch, self._timings = watch, timings
        self.hang = Hang(plan, me, start.number, watch.size) if watched else None
        self._names = [node["name"] for node in world["nodes"]]
        self._me, self._children = me, children
        self._open = dict(channels)
        self._parts = False
        for node, connection in channels.items():
            children.watch(connection.line.fileno(), lambda node=node: self._read(node))  # type: ignore[misc]

    def lead(self, explain: Callable[[int], Finding]) -> int:
        """Wait until the launchers of all nodes, and their processes, have ended; return this node's exit code.

        `explain` turns the launcher's exit code into the reason why this node has failed.
        """
        code, deadline, idle = 0, 0.0, False
        while self._children.running or self._waits():
            if self._ends():
                if not self._children.running and self.may_restart():
                    break
                deadline = deadline or time.monotonic() + _REST + (_FIRST_S if self._me else 0.0)
                if time.monotonic() > deadline:
                    break
            events = self._children.wait(_COLLECTING_S if self._hangs() else _LOOK_S)
            self._obey(self._file_watch.stop_lines)
            for number in events.signals:
                self.heard(number)
            self._watch()
            self._tell_times(last=not self._children.running)
            for code in events.ended.values():
                if code and not self.stopped and not self._hangs() and (self.saved or not self.cause):
                    self._failed(explain(code))
            if self._me and not idle and not self._children.running and not self._hangs():
                idle = True
                if self.stopped:  # ranks of a launcher that did not wait for them may still save
                    self._children.end(_GRACE)
                self._children.sweep(_KILLING_S)
                self._tell_all(Idle())
        if self.saved and self._me:  # the first node says it for all: srun ends the others with the first that fails
            return exit_codes.DONE
        return self.cause.code if self.cause else exit_code(code)

    def _ends(self) -> bool:
        """Whether all nodes are to end now. After a stop its ranks may still save, for as long as Slurm lets them."""
        if self.stopped:
            return not self._children.running
        return self.cause is not None and not self.saved and not self._hangs()

    def _watch(self) -> None:
        """Watch whether the ranks make progress; if they hang, end them with the reason."""
        if self.hang is None or self.stopped or (self.cause and not self.saved and not self._hangs()):
            return
        for message in self.hang.look():
            self._tell_all(message)
        self.cause = self.cause or self.hang.begun
        if found := self.hang.named:
            self.saved = False
            print(f"dray: the run ends: {found}", file=sys.stderr, flush=True)
            self.fail(found)
            self._children.end(_HUNG_GRACE)

    def _tell_times(self, *, last: bool) -> None:
        if parts := self._timings.look(last=last):
            self._tell_all(StartTimes(parts))

    def _hangs(self) -> bool:
        """Whether the run hangs, and the first node has not yet named the cause."""
        return self.hang is not None and self.hang.open

    def ask(self) -> None:
        """Ask the ranks of all nodes to save and end."""
        if not self.asked:
            self.asked = True
            print("dray: the ranks are asked to save and end", flush=True)
            self._children.ask()
            self._tell_all(Save())

    def _failed(self, found: Finding) -> None:
        """Note a failure; a rank that was asked to save, and ends with 75, has not failed."""
        if not self.asked or found.code != exit_codes.RETRY:
            self.saved = False
            self.fail(found)
        elif not self.saved:
            self._save(found)
            self._tell_all(Saved(found))

    def _save(self, found: Finding) -> None:
        self.cause, self.saved = found, True

    def fail(self, finding: Finding) -> None:
        """Tell all nodes why this one has failed."""
        self.cause = finding
        self._tell_all(Failed(finding))

    def report_preflight(self, reports: list[dict[str, Any]]) -> None:
        """Report to the first node how far this node's ranks have come; nothing if all have passed."""
        self.report_wanted, self.preflight[self._me] = False, reports
        if self._me:
            self._tell_all(Reports(tuple(reports)))

    def ask_preflight(self) -> None:
        """As the first node, ask for new reports of all nodes whose ranks have not passed, and forget the old ones."""
        self.preflight = {node: [] for node, reports in self.preflight.items() if not reports}
        self.report_wanted = True
        self._tell_all(ReportsWanted())

    def may_restart(self) -> bool:
        """Whether all ranks may be started again; only the first node decides that."""
        if self._me or not self.cause or self.cause.code in _FINAL or self.stopped or self.asked:
            return False
        return self._left > 0 and len(self._open) == len(self._names) - 1

    def restart(self, start: Restart) -> None:
        """As the first node: call all others to the next rendezvous; `drop` the connections once they are there."""
        self.next = start
        self._tell_all(start)
        self._part(_CALLING_S)

    def close(self) -> None:
        """Tell the others that this node has ended by itself, and was not lost."""
        self._tell_times(last=True)
        self._timings.write()
        self._tell_all(Ended())
        self._part(_PART_S)
        self.drop()

    def _part(self, seconds: float) -> None:
        """Close the connections whose other end closes within these seconds, and so has read everything.

        The kernel resets a connection that is closed with unread data, and drops the last message.
        """
        deadline, self._parts = time.monotonic() + seconds, True
        for connection in self._open.values():
            with suppress(OSError):  # it is gone, which is read next
                connection.line.shutdown(socket.SHUT_WR)
        while self._open and (left := deadline - time.monotonic()) > 0:
            self._children.look(left)

    def drop(self) -> None:
        """Close the connections that are still open."""
        for node in list(self._open):
            self._close(node)

    def _waits(self) -> bool:
        if self._me:
            return bool(self._open)
        return (self._hangs() and not self.stopped) or any(node not in self._idle for node in self._open)

    def heard(self, number: int) -> None:
        """Handle a signal to this node. One that stops the run goes to all nodes, and to the launcher only once."""
        if number == signal.SIGUSR1:
            self.ask()
        elif number not in _STOPS:
            self._children.tell(number)
        elif not self.stopped:
            self._stop(number)
            self._tell_all(Stop())

    def _obey(self, lines: list[bytes]) -> None:
        """Do what the stop file asks for, if there is something in it."""
        if self._stops_now or not lines:
            return
        self._stops_now = run_folder.NOW.encode() in lines
        if self._stops_now:
            self._stop(signal.SIGTERM, now=True)
            self._tell_all(Stop(now=True))
        else:
            self.ask()

    def _stop(self, number: int, *, now: bool = False) -> None:
        """End the launcher: its ranks may save as long as Slurm lets them; `now`, only within the grace."""
        if now:
            self._children.end(_GRACE)
        elif not self.stopped:
            self._children.tell(number)
        self.stopped = True

    def _read(self, node: int) -> None:
        try:
            for message in self._open[node].receive():
                if node in self._open and not self._parts:
                    self._hear(node, message)
        except OSError as error:
            if self._parts:
                self._close(node)
            else:
                self._lost(node, str(error))

    def _hear(self, node: int, message: Message) -> None:
        match message:
            case Stop(now):
                if not self.stopped:
                    self._pass_on(Stop())
                self._stop(signal.SIGTERM, now=now)
            case Save():
                self.ask()
            case Saved(finding):
                if not self.cause:
                    self._save(finding)
            case Failed(finding):
                if (self.saved or not self.cause or self._hangs()) and not self.stopped:
                    self.saved = False
                    if self.hang:
                        self.hang.open = False
                    self._end(finding)
                    self._pass_on(message)
            case Restart():
                self.next = message
                self._forget(node)
            case Ended():
                self._forget(node)
            case _:
                self._collect(node, message)

    def _collect(self, node: int, message: Message) -> None:
        """Take what the first node collects of all nodes, or asks for, and a hang."""
        match message:
            case StartTimes(parts):
                self._timings.hear(node, parts)
            case Reports(reports):
                self.preflight[node] = list(reports)
            case ReportsWanted():
                self.report_wanted = True
            case Idle():
                self._idle.add(node)
            case _:
                self._hear_of_a_hang(message)

    def _hear_of_a_hang(self, message: Message) -> None:
        failed = self.cause and not self.saved and not self._hangs()
        if self.hang is None or (failed and not self._me):  # what waits for ranks that have failed does not hang
            return
        if reply := self.hang.hear(message):
            self._tell_all(reply)
        self.cause = self.cause or self.hang.begun

    def _lost(self, node: int, why: str) -> None:
        self._forget(node)
        if self.stopped:  # without that node's ranks none can save; after KillWait Slurm kills the batch script as well
            self._children.end(_GRACE)
            return
        name = self._names[node]
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
        self.end(finding)

    def end(self, finding: Finding) -> None:
        """End the run on all nodes, unless it is ending already."""
        if not self.cause and not self.stopped:
            self._end(finding)
            self._pass_on(Failed(finding))

    def _end(self, finding: Finding) -> None:
        """The run has failed elsewhere: this node's ranks would wait for the others for ever."""
        self.cause = finding
        print(f"dray: this node's ranks are stopped: {finding}", file=sys.stderr, flush=True)
        self._children.end(_GRACE)

    def _pass_on(self, message: Message) -> None:
        if self._me == 0:
            self._tell_all(message)

    def _tell_all(self, message: Message) -> None:
        for connection in self._open.values():
            with suppress(OSError):  # it is gone, which is read next
                connection.send(message)

    def _forget(self, node: int) -> None:
        if node == 0:  # it ends last, unless its image is gone: no rank of this node can go on, or save, without it
            self._children.end(_GRACE)
        self._close(node)

    def _close(self, node: int) -> None:
        connection = self._open.pop(node)
        self._children.forget(connection.line.fileno())
        connection.line.close()
