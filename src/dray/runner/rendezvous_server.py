"""The first node's side of the rendezvous: one loop over all connections, none of which blocks another."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from dray.contract import exit_codes, run_folder
from dray.contract.findings import DrayError, UnfitError
from dray.contract.hostnames import compress
from dray.runner import channel, record
from dray.runner.channel import Channel
from dray.runner.hello import StoppedError, check_limit_s, why_refused

_UNPROVED = 512  # connections at least that have proved nothing yet
_FEWEST_UNPROVED = 64
_OWN_FILES = 64  # of the runner's and its children's own
_AT_ONCE = 128  # accepted between two looks at those that are there
_SHOWN = 20  # nodes in a message
_LONGEST_LIST = 8192  # letters: all nodes hear it in one message


def gather(plan: Mapping[str, Any], own: Mapping[str, Any], key: bytes, listener: socket.socket) -> dict[int, Channel]:
    """As the first node: return the connections to all others; or tell all why the run cannot start, and raise that."""
    world = plan["world"]
    server = _Server(world, own, key, listener)
    refusal = server.open(time.monotonic() + world["rendezvous_timeout_s"])
    if isinstance(refusal, StoppedError):
        record.failing_nodes(plan["folder"], server.unfit_names())
    for guest in server.told:
        try:
            guest.send({"refused": refusal.finding._asdict()} if refusal else {"go": True})
        except OSError:  # it is gone, which is seen next
            continue
    if refusal:
        for guest in server.told:
            guest.close()
        raise refusal
    return server.guests


class _Guest(NamedTuple):
    """A node that has come."""

    channel: Channel
    host: str
    runner: str


class _Server:
    """Decides which connections belong to nodes of the run."""

    def __init__(self, world: Mapping[str, Any], own: Mapping[str, Any], key: bytes, listener: socket.socket) -> None:
        self._guests: dict[int, _Guest] = {}
        self._numbers: dict[int, int] = {}  # of nodes, by file
        self._twins: list[Channel] = []  # which have another's number
        self._world, self._own, self._key, self._listener = world, own, key, listener
        self._hosts = {own["host"]: own["name"]}
        self.unfit: dict[int, str] = {}  # why, by number
        self._deadline = 0.0
        self._unproved: dict[int, Pending] = {}
        self._turned_away = 0
        self._most_unproved = allow_files(world)
        self._poll = select.epoll()
        listener.setblocking(False)

    @property
    def guests(self) -> dict[int, Channel]:
        """The connection to each node."""
        return {node: guest.channel for node, guest in self._guests.items()}

    @property
    def told(self) -> list[Channel]:
        """The connections that get the answer."""
        return [*(guest.channel for guest in self._guests.values()), *self._twins]

    def open(self, deadline: float) -> DrayError | None:
        """Wait until all nodes have come; return why the run cannot start, if it cannot.

        If a node is unfit, the first node still waits for the checks of the others, so that all unfit nodes get named.
        """
        self._deadline = deadline
        self._note(self._own)
        self._poll.register(self._listener, select.POLLIN)
        refusal: DrayError | None = None
        late: DrayError | None = None
        while refusal is None and len(self._guests) < len(self._world["nodes"]) - 1:
            now = time.monotonic()
            if now > self._deadline:
                refusal = late = self._missing()
                break
            while (oldest := self._oldest()) and now > oldest.deadline:
                self._drop(oldest)
            until = min(self._deadline, oldest.deadline) if oldest else self._deadline
            knocks = False
            for file, _ in self._poll.poll(max(0, until - now) + 0.001):
                if file == self._listener.fileno():
                    knocks = True
                elif file in self._unproved:
                    refusal = self._hear(self._unproved[file]) or refusal
                elif file in self._numbers:  # what it says before the answer is of no use
                    self._forget(self._numbers[file])
            if knocks:  # last, so that a file which was closed above is not taken for the new one of its number
                self._accept()
        for pending in list(self._unproved.values()):
            self._drop(pending)
        self._poll.close()
        return self._stopped(late) if self.unfit and refusal is late else refusal

    def _oldest(self) -> Pending | None:
        """The oldest unproved connection: they are in the order of arrival, and all have the same time."""
        return next(iter(self._unproved.values()), None)

    def _note(self, hello: Mapping[str, Any]) -> None:
        """Note what a node's own check found; the others began theirs at the same time, and get as long again."""
        if hello["unfit"]:
            self.unfit[hello["node"]] = hello["unfit"]
            self._deadline = min(self._deadline, time.monotonic() + check_limit_s(self._world))

    def unfit_names(self) -> list[str]:
        """The names of the unfit nodes, in the order of the plan."""
        return [self._name(node) for node in sorted(self.unfit)]

    def _stopped(self, late: DrayError | None) -> StoppedError:
        """The refusal for unfit nodes; each of them has recorded why."""
        names, nodes = self.unfit_names(), self._world["nodes"]
        shown = [f"{self._name(node)}: {self.unfit[node]}" for node in sorted(self.unfit)[:_SHOWN]]
        return StoppedError(
            f"{len(names)} of {len(nodes)} nodes are unfit: {' '.join(names[:_SHOWN])}{' ...' * bool(names[_SHOWN:])}",
            wanted="nodes that pass the node check",
            found="\n".join([*shown, *([late.finding.found] if late else [])]),
            fix=f"leave them out: sbatch --exclude=$(cat {run_folder.FAILING_NODES})",
            code=exit_codes.UNFIT,
            node=names[0],
        )

    def _accept(self) -> None:
        """Accept some of the waiting connections; the loop reads these first, or a crowd would push them out."""
        for _ in range(_AT_ONCE):
            oldest = self._oldest()
            if oldest and len(self._unproved) >= self._most_unproved:
                self._drop(oldest)
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # the machine's own table is full
                    self._drop(oldest) if oldest else time.sleep(0.05)
                return
            pending = Pending(line, channel.proof_s(len(self._world["nodes"])))
            self._unproved[line.fileno()] = pending
            self._poll.register(line, select.EPOLLIN)
            try:
                line.send(pending.nonce)
            except OSError:
                self._drop(pending)

    def _hear(self, pending: Pending) -> DrayError | None:
        """Read a piece of the greeting, or, after the proof, the hello."""
        try:
            if pending.channel is None:
                pending.greeting += pending.read()
                if len(pending.greeting) == channel.GREETING:
                    pending.channel = channel.answer(pending.line, self._key, pending.nonce, pending.greeting)
                    if pending.channel is None:
                        self._turned_away += 1
                        raise channel.BrokenError("another run's, or nobody's")
                return None
            messages = pending.channel.receive()
        except (OSError, ValueError):
            self._drop(pending)
            return None
        return self._admit(pending, messages[0]) if messages else None

    def _admit(self, pending: Pending, hello: dict[str, Any]) -> DrayError | None:
        assert pending.channel is not None
        node, file = hello["node"], pending.line.fileno()
        del self._unproved[file]
        before = self._guests.get(node)
        if before and before.runner == hello["runner"] and hello["plan"] == self._own["plan"]:
            self._forget(node)  # it lost its first connection, of whose end the network has told nobody
        twin = None if self._world["one_machine"] else self._hosts.get(hello["host"])
        refusal = why_refused(hello, {**self._own, "time": time.time()}, self._guests, twin)
        if refusal is None:
            self._note(hello)
        self._hosts[hello["host"]] = hello["name"]
        if node in self._guests:
            self._twins.append(pending.channel)
        else:
            self._guests[node] = _Guest(pending.channel, hello["host"], hello["runner"])
            self._numbers[file] = node
        return refusal

    def _forget(self, node: int) -> None:
        """Close the connection of a node that is gone before all have come: it may come again."""
        guest = self._guests.pop(node)
        file = guest.channel.line.fileno()
        del self._numbers[file]
        self._hosts.pop(guest.host, None)
        self._poll.unregister(file)
        guest.channel.close()

    def _drop(self, pending: Pending) -> None:
        del self._unproved[pending.line.fileno()]
        self._poll.unregister(pending.line)
        pending.line.close()

    def _name(self, node: int) -> str:
        return str(self._world["nodes"][node]["name"])

    def _missing(self) -> UnfitError:
        nodes = self._world["nodes"]
        absent = [self._name(number) for number in range(1, len(nodes)) if number not in self._guests]
        missing = compress(absent)
        if len(missing) > _LONGEST_LIST:
            print(f"dray: missing: {missing}", flush=True)
            missing = f"{missing[:_LONGEST_LIST].rpartition(',')[0]} ..., all in {run_folder.node_log(0)}"
        others = f"; {self._turned_away} connections without this run's secret were closed" * bool(self._turned_away)
        address, port = self._listener.getsockname()
        return UnfitError(
            f"{len(absent)} of {len(nodes)} nodes did not reach the first one in "
            f"{self._world['rendezvous_timeout_s']} s",
            wanted=f"a connection of every node to {address} port {port}",
            found=f"missing: {missing}{others}",
            fix="see the logs of these nodes; or give them more time: rendezvous_timeout_s=SECONDS",
        )


class Pending:
    """A connection that has not yet proved the secret, or not yet said which node it is."""

    def __init__(self, line: socket.socket, seconds: float) -> None:
        line.setblocking(False)
        self.line, self.nonce, self.greeting = line, os.urandom(channel.NONCE), b""
        self.deadline = time.monotonic() + seconds
        self.channel: Channel | None = None

    def read(self) -> bytes:
        """Read up to the end of the greeting; later bytes belong to the channel."""
        data = self.line.recv(channel.GREETING - len(self.greeting))
        if not data:
            raise channel.BrokenError("it left")
        return data


def allow_files(world: Mapping[str, Any]) -> int:
    """Raise the limit of open files; return how many unproved connections fit beside one of each node.

    The default limit is too low for a thousand nodes; the hard limit is the administrators'.
    """
    nodes = len(world["nodes"])
    fixed, room = nodes + _OWN_FILES, max(nodes, _UNPROVED)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = fixed + room if hard == resource.RLIM_INFINITY else min(fixed + room, hard)
    if limit < fixed + _FEWEST_UNPROVED:
        raise UnfitError(
            f"the first node may open {hard} files, too few for {nodes} nodes",
            wanted=f"a hard limit of {fixed + _FEWEST_UNPROVED} open files: one for each node and some more",
            found=f"ulimit -Hn: {hard}",
            where=world["nodes"][0]["name"],
            fix=f"ask the administrators to raise it (LimitNOFILE of slurmd), or ask for "
            f"{max(1, hard - _OWN_FILES - _FEWEST_UNPROVED)} nodes at most",
        )
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit - fixed
