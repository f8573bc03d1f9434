"""The first node's side of the rendezvous: who has come, who is missing, and why the run cannot start."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dray.contract import exit_codes, run_folder
from dray.contract.findings import DrayError, UnfitError
from dray.contract.hostnames import compress
from dray.runner import hub, record
from dray.runner.hello import StoppedError, why_refused
from dray.runner.hub import Connection
from dray.runner.protocol import Hello, Message, Refusal, Welcome

_OTHER_FILES = 128  # of the runner's and its children's own, and of connections that have proved nothing yet
_SHOWN = 20  # nodes in a message


class Rendezvous:
    """The nodes that have come to the first one."""

    def __init__(self, plan: Mapping[str, Any], own: Hello, key: bytes, listener: socket.socket) -> None:
        self._plan, self._world, self._own, self._listener = plan, plan["world"], own, listener
        self._names = [node["name"] for node in self._world["nodes"]]
        self._here: dict[int, tuple[Hello, Connection]] = {}
        self._hosts = {own.host: own.name}
        self._refused: list[Connection] = []
        self._unfit: dict[int, str] = {}  # why, by number
        self._refusal: DrayError | None = None
        self._deadline = time.monotonic() + self._world["rendezvous_timeout_s"]
        require_files(len(self._names), self._names[0])
        self._server = hub.Server(listener, key, self._came, len(self._names))
        self._note(own)

    def gather(self) -> dict[int, Connection]:
        """Return the connections to all others; or tell all why the run cannot start, and raise that.

        If a node is unfit, the first node still waits for the checks of the others, so that all unfit nodes get named.
        """
        while not self._refusal and len(self._here) < len(self._names) - 1:
            if time.monotonic() > self._deadline:
                missing = self._missing()
                self._refusal = self._stopped(missing.finding.found) if self._unfit else missing
                break
            self._server.serve(self._deadline)
        self._server.close()
        refusal = self._refusal or (self._stopped() if self._unfit else None)
        answer = Refusal(refusal.finding) if refusal else Welcome()
        guests = {node: connection for node, (_, connection) in self._here.items()}
        for guest in (*guests.values(), *self._refused):
            with suppress(OSError):  # it is gone, which is seen next
                guest.send(answer)
            if refusal:
                guest.line.close()
        if refusal:
            raise refusal
        return guests

    def _came(self, connection: Connection, message: Message) -> None:
        hello = Hello(*message)
        before = self._here.get(hello.node)
        if before and (before[0].runner, before[0].plan) == (hello.runner, hello.plan):
            self._forget(hello.node)  # it lost its first connection, of whose end the network has told nobody
        twin = None if self._world["one_machine"] else self._hosts.get(hello.host)
        if refusal := why_refused(hello, self._own._replace(time=time.time()), self._here, twin):
            self._refusal = refusal
            self._refused.append(connection)
            return
        self._note(hello)
        self._hosts[hello.host] = hello.name
        self._here[hello.node] = hello, connection
        # What it says before the answer is its end.
        self._server.loop.watch(connection.line.fileno(), lambda: self._forget(hello.node))

    def _note(self, hello: Hello) -> None:
        """Note what a node's own check found; the others began theirs at the same time, and get as long again."""
        if hello.unfit:
            self._unfit[hello.node] = hello.unfit
            self._deadline = min(self._deadline, time.monotonic() + self._world["rendezvous_timeout_s"] / 2)

    def _forget(self, node: int) -> None:
        """Close the connection of a node that is gone before all have come: it may come again."""
        hello, connection = self._here.pop(node)
        self._hosts.pop(hello.host, None)
        self._server.loop.forget(connection.line.fileno())
        connection.line.close()

    def _stopped(self, missing: str = "") -> StoppedError:
        """The refusal for unfit nodes; each of them has recorded why."""
        unfit = sorted(self._unfit)
        names = [self._names[node] for node in unfit]
        record.failing_nodes(self._plan["folder"], names)
        shown = [f"{self._names[node]}: {self._unfit[node]}" for node in unfit[:_SHOWN]]
        return StoppedError(
            f"{len(names)} of {len(self._names)} nodes are unfit: {' '.join(names[:_SHOWN])}"
            f"{' ...' * bool(names[_SHOWN:])}",
            wanted="nodes that pass the node check",
            found="\n".join([*shown, *([missing] if missing else [])]),
            fix=f"leave them out: sbatch --exclude=$(cat {run_folder.FAILING_NODES})",
            code=exit_codes.UNFIT,
            node=names[0],
        )

    def _missing(self) -> UnfitError:
        absent = [name for node, name in enumerate(self._names) if node and node not in self._here]
        missing, turned_away = compress(absent), self._server.turned_away
        others = f"; {turned_away} connections without this run's secret were closed" * bool(turned_away)
        address, port = self._listener.getsockname()
        return UnfitError(
            f"{len(absent)} of {len(self._names)} nodes did not reach the first one in "
            f"{self._world['rendezvous_timeout_s']} s",
            wanted=f"a connection of every node to {address} port {port}",
            found=f"missing: {missing}{others}",
            fix="see the logs of these nodes; or give them more time: rendezvous_timeout_s=SECONDS",
        )


def require_files(nodes: int, first: str) -> None:
    """Refuse a first node that cannot hold a connection of each node; the runner has raised the limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < nodes + _OTHER_FILES:
        raise UnfitError(
            f"the first node may open {most} files, too few for {nodes} nodes",
            wanted=f"a hard limit of {nodes + _OTHER_FILES} open files: one for each node and some more",
            found=f"ulimit -n: {most}",
            where=first,
            fix=f"ask the administrators to raise it (LimitNOFILE of slurmd), or ask for {most - _OTHER_FILES} nodes",
        )
