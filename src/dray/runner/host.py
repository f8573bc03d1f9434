"""The first node's side of the rendezvous: any number of connections at once, of which none makes another wait."""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from dray.contract import exit_codes, run_folder
from dray.contract.findings import DrayError, UnfitError
from dray.runner import channel, check, introduction, record
from dray.runner.channel import Channel
from dray.runner.introduction import StoppedError

_MOST_UNPROVED = 512
_SHOWN = 20  # nodes in a message


def gather(plan: Mapping[str, Any], own: Mapping[str, Any], key: bytes, listener: socket.socket) -> dict[int, Channel]:
    """As the first node: the connections to all others, or what is wrong with one of them, which all are told."""
    world = plan["world"]
    door = _Door(world, own, key, listener)
    refusal = door.open(time.monotonic() + world["rendezvous_timeout_s"])
    if isinstance(refusal, StoppedError):
        record.failing_nodes(plan["folder"], door.unfit_names())
    for guest in door.told:
        try:
            guest.send({"refused": refusal.finding._asdict()} if refusal else {"go": True})
        except OSError:  # it is gone, which is seen next
            continue
    if refusal:
        for guest in door.told:
            guest.close()
        raise refusal
    return door.guests


class _Door:
    """Whom to let in."""

    def __init__(self, world: Mapping[str, Any], own: Mapping[str, Any], key: bytes, listener: socket.socket) -> None:
        self.guests: dict[int, Channel] = {}
        self.told: list[Channel] = []  # also one that has another's number
        self._world, self._own, self._key, self._listener = world, own, key, listener
        self._hosts = {own["host"]: own["name"]}
        self.unfit: dict[int, str] = {}  # why, by number
        self._deadline = 0.0
        self._unproved: dict[int, _Visitor] = {}
        self._turned_away = 0
        self._poll = select.poll()
        listener.setblocking(False)
        _allow_files(len(world["nodes"]) + _MOST_UNPROVED + 64)

    def open(self, deadline: float) -> DrayError | None:
        """Until all are there, or it is clear that the run cannot start.

        Where a node is unfit the others still come, each once its own check has ended, so that all that are get named.
        """
        self._deadline = deadline
        self._note(self._own)
        self._poll.register(self._listener, select.POLLIN)
        refusal: DrayError | None = None
        late: DrayError | None = None
        while refusal is None and len(self.guests) < len(self._world["nodes"]) - 1:
            now = time.monotonic()
            if now > self._deadline:
                refusal = late = self._missing()
                break
            for visitor in [one for one in self._unproved.values() if now > one.deadline]:
                self._show_out(visitor)
            waits = [self._deadline, *(one.deadline for one in self._unproved.values())]
            for file, _ in self._poll.poll(max(0, (min(waits) - now) * 1000) + 1):
                if file == self._listener.fileno():
                    self._accept()
                elif file in self._unproved:
                    refusal = self._hear(self._unproved[file]) or refusal
                else:
                    self._left(file)
        for visitor in list(self._unproved.values()):
            self._show_out(visitor)
        return self._stopped(late) if self.unfit and refusal is late else refusal

    def _note(self, hello: Mapping[str, Any]) -> None:
        """What a node's own check found; the others, which began when it did, have as long again to come."""
        if hello["unfit"]:
            self.unfit[hello["node"]] = hello["unfit"]
            self._deadline = min(self._deadline, time.monotonic() + check.limit(self._world))

    def unfit_names(self) -> list[str]:
        """In the order of the nodes."""
        return [self._name(node) for node in sorted(self.unfit)]

    def _stopped(self, late: DrayError | None) -> StoppedError:
        """Each node that is unfit has recorded why."""
        names, nodes = self.unfit_names(), self._world["nodes"]
        shown = [f"{self._name(node)}: {self.unfit[node]}" for node in sorted(self.unfit)[:_SHOWN]]
        return StoppedError(
            f"{len(names)} of {len(nodes)} nodes are unfit: {' '.join(names[:_SHOWN])}{' ...' * bool(names[_SHOWN:])}",
            wanted="nodes that pass their own check",
            found="\n".join([*shown, *([late.finding.found] if late else [])]),
            fix=f"leave them out: sbatch --exclude=$(cat {run_folder.FAILING_NODES})",
            code=exit_codes.UNFIT,
            node=names[0],
        )

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:  # gone before it was let in
            return
        visitor = _Visitor(line)
        if len(self._unproved) >= _MOST_UNPROVED:
            self._show_out(next(iter(self._unproved.values())))
        self._unproved[line.fileno()] = visitor
        self._poll.register(line, select.POLLIN)
        try:
            line.send(visitor.nonce)
        except OSError:
            self._show_out(visitor)

    def _hear(self, visitor: _Visitor) -> DrayError | None:
        """A piece of its greeting, or, when it has proved the secret, who it is."""
        try:
            if visitor.channel is None:
                visitor.greeting += visitor.read()
                if len(visitor.greeting) == channel.GREETING:
                    visitor.channel = channel.answer(visitor.line, self._key, visitor.nonce, visitor.greeting)
                    if visitor.channel is None:
                        self._turned_away += 1
                        raise channel.BrokenError("another run's, or nobody's")
                return None
            messages = visitor.channel.receive()
        except (OSError, ValueError):
            self._show_out(visitor)
            return None
        return self._admit(visitor, messages[0]) if messages else None

    def _admit(self, visitor: _Visitor, hello: dict[str, Any]) -> DrayError | None:
        assert visitor.channel is not None
        if not introduction.readable(hello, self._own, len(self._world["nodes"])):
            self._show_out(visitor)
            return None
        del self._unproved[visitor.line.fileno()]
        twin = None if self._world["one_machine"] else self._hosts.get(hello["host"])
        refusal = introduction.odd(hello, {**self._own, "time": time.time()}, self.guests, twin)
        if refusal is None:
            self._note(hello)
        self._hosts[hello["host"]] = hello["name"]
        self.guests.setdefault(hello["node"], visitor.channel)
        self.told.append(visitor.channel)
        return refusal

    def _left(self, file: int) -> None:
        """A node that is gone before all are there may come again."""
        for node, guest in list(self.guests.items()):
            if guest.line.fileno() == file:
                del self.guests[node]
                self.told.remove(guest)
                self._hosts = {host: name for host, name in self._hosts.items() if name != self._name(node)}
                self._poll.unregister(file)
                guest.close()

    def _show_out(self, visitor: _Visitor) -> None:
        del self._unproved[visitor.line.fileno()]
        self._poll.unregister(visitor.line)
        visitor.line.close()

    def _name(self, node: int) -> str:
        return str(self._world["nodes"][node]["name"])

    def _missing(self) -> UnfitError:
        nodes = self._world["nodes"]
        absent = [self._name(number) for number in range(1, len(nodes)) if number not in self.guests]
        others = f"; {self._turned_away} connections without this run's secret were closed" * bool(self._turned_away)
        address, port = self._listener.getsockname()
        return UnfitError(
            f"{len(absent)} of {len(nodes)} nodes did not come in {self._world['rendezvous_timeout_s']} s",
            wanted=f"all nodes at {address} port {port}",
            found=f"missing: {' '.join(absent[:_SHOWN])}{' ...' if len(absent) > _SHOWN else ''}{others}",
            fix="see the logs of these nodes; `rendezvous_timeout_s` in the recipe is the time they are given",
        )


class _Visitor:
    """A connection that has proved nothing yet, or has not said who it is."""

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self.line, self.nonce, self.greeting = line, os.urandom(channel.NONCE), b""
        self.deadline = time.monotonic() + channel.PROOF_S
        self.channel: Channel | None = None

    def read(self) -> bytes:
        """No byte beyond the greeting; what follows it is the channel's."""
        data = self.line.recv(channel.GREETING - len(self.greeting))
        if not data:
            raise channel.BrokenError("it left")
        return data


def _allow_files(count: int) -> None:
    """A thousand nodes are more connections than a process may open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (min(count, hard) if hard != resource.RLIM_INFINITY else count, hard)
        )
