"""All nodes find and check one another before anything is launched.

The first node binds a port and writes it to rendezvous.json; the others connect, prove the run's secret and say which
node they are and what they hold. The first node answers all at once: welcome, or what is wrong. So a missing node, a
second one with the same number or one with another plan or image stops the run early. `control` keeps the connections.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, Finding, UnfitError, error
from dray.runner import address as address_of
from dray.runner import hub, record
from dray.runner.hello import StoppedError, make_hello
from dray.runner.hub import Connection
from dray.runner.protocol import BrokenError, Hello, Refusal, Restart
from dray.runner.rendezvous_server import Rendezvous

_LONGEST = 4096  # bytes of a file that somebody else may have written
_SHORTEST_SECRET = 32
_LOOKS_PER_S = 2000  # of all nodes together at the shared disk, and at the first node
_ONE_WAVE = 1024  # nodes that any kernel's queue holds
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_TRY_S, _LATER_S = 10.0, 5.0  # to connect; and for the first node's answer, whose own deadline may be later
_ENDING_S = 30  # a launcher that does not end is killed within 10


def secret_of(folder: str) -> bytes:
    """The run's secret, which was written beside plan.json."""
    path = f"{folder}/{run_folder.SECRET}"
    try:
        secret = files.read(path, limit=_LONGEST, own=True).strip()
        if len(secret) < _SHORTEST_SECRET:  # a disk was full: one that is short, anybody guesses
            raise OSError(f"{len(secret)} characters")
    except OSError as error:
        raise ConfigError(
            "the run's secret cannot be read",
            where=path,
            wanted="the file that was written with plan.json",
            found=error,
        ) from error
    return secret


def meet(
    plan: Mapping[str, Any],
    me: int,
    digest: str,
    start: Restart = Restart(),  # noqa: B008  it cannot be changed
    at: tuple[str, int] | None = None,
    listener: socket.socket | None = None,
    unfit: Finding | None = None,
) -> tuple[dict[int, Connection], tuple[str, int], socket.socket | None]:
    """Wait for all nodes; return the connections, the first node's address and port, and on it the listening socket.

    Before a restart the others know the first node's address and port, `at`. An `unfit` node comes too, so that all
    nodes hear of it at once, and none waits for a node that will not come.
    """
    world = plan["world"]
    several = len(world["nodes"]) > 1
    key = start.key(secret_of(plan["folder"])) if several else b""
    own = make_hello(plan, me, digest, unfit.problem if unfit else "")
    if start.number:  # the ranks before have to end first
        world = {**world, "rendezvous_timeout_s": world["rendezvous_timeout_s"] + _ENDING_S}
        plan = {**plan, "world": world}
    if me > 0:
        first, address = join(plan, own, key, at)
        return {0: first}, address, None
    if not listener:
        listener = address_of.listen(world)
        if several and world["shared_folder"]:
            publish(plan, listener)
    if unfit and not several:
        record.failing_nodes(plan["folder"], [own.name])
        raise error(unfit)
    guests = Rendezvous(plan, own, key, listener).gather() if several else {}
    return guests, listener.getsockname(), listener


def publish(plan: Mapping[str, Any], listener: socket.socket) -> None:
    """Tell the other nodes where the first one listens."""
    _write(plan, listener.getsockname())


def clocked(plan: Mapping[str, Any], me: int, start: Restart, at: tuple[str, int], clock: Mapping[str, float]) -> None:
    """As the first node: add to rendezvous.json when the runner began, all nodes had met and ranks were launched."""
    if me or start.number:
        return
    times = {name: round(seconds, 3) for name, seconds in {**clock, "launched": time.time()}.items()}
    try:
        _write(plan, at if len(plan["world"]["nodes"]) > 1 else (), times=times)
    except OSError as error:  # no run ends for it
        print(f"dray: {run_folder.RENDEZVOUS} cannot be written: {error.strerror}", flush=True)


def _write(plan: Mapping[str, Any], at: Sequence[object], **told: object) -> None:
    fields = {**dict(zip(("address", "port"), at, strict=False)), **told, "attempt": plan["attempt"]}
    files.write_atomic(f"{plan['folder']}/{run_folder.RENDEZVOUS}", json.dumps(fields))


def published(plan: Mapping[str, Any]) -> tuple[str, int] | None:
    """The address and port of this attempt's first node; None before it has written them."""
    world, folder = plan["world"], plan["folder"]
    if not world["shared_folder"]:
        return world["master"], world["port"]
    try:
        # Listing the folder makes an NFS client ask again for a file that it remembers as missing.
        if run_folder.RENDEZVOUS not in os.listdir(folder):
            return None
        told = json.loads(files.read(f"{folder}/{run_folder.RENDEZVOUS}", limit=_LONGEST))
        return (told["address"], told["port"]) if told["attempt"] == plan["attempt"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def join(
    plan: Mapping[str, Any], own: Hello, key: bytes, at: tuple[str, int] | None = None
) -> tuple[Connection, tuple[str, int]]:
    """As any other node: the connection to the first one, and its address and port, once all nodes are there."""
    nodes, limit = len(plan["world"]["nodes"]), plan["world"]["rendezvous_timeout_s"]
    deadline, pause = time.monotonic() + limit, _PAUSE_S
    broken, reason, address = "", f"no {run_folder.RENDEZVOUS} in {plan['folder']}", None
    time.sleep(first_wait(nodes))
    while time.monotonic() < deadline:
        try:
            if address := at or published(plan):
                first = _connect(address, own, key, nodes, deadline, limit)
                return first, (first.line.getpeername()[0], address[1])
        except BrokenError as error:
            broken = broken or str(error)
        except (OSError, ValueError) as error:  # not listening yet, name not there yet or none
            reason = str(error)
        time.sleep(max(0.0, min(jittered(pause), deadline - time.monotonic())))
        pause = longer(pause, nodes)
    raise UnfitError(
        f"node {own.node} ({own.name}) could not reach the first node in {limit} s",
        wanted=f"a connection to {address[0]} port {address[1]}" if address else "the address of the first node",
        found=broken or reason,
        fix=f"see {run_folder.node_log(0)}: the first node may not have started, may have another secret, or may be on "
        "a network that this node does not reach",
    )


def _connect(address: tuple[str, int], own: Hello, key: bytes, nodes: int, deadline: float, limit: float) -> Connection:
    """The connection to the first node, once it has let all nodes in. BrokenError: it is another's, or has ended."""
    line = socket.create_connection(address, timeout=max(0.01, min(_TRY_S, deadline - time.monotonic())))
    try:
        first = hub.greet(line, key, min(deadline, time.monotonic() + hub.proof_s(nodes)))
        first.send(own._replace(time=time.time()))
        # The first node knows who is missing. It may have come later, and so may its deadline.
        answer = first.receive_first(time.monotonic() + limit + _LATER_S)
    except OSError:
        line.close()
        raise
    if isinstance(answer, Refusal):
        raise StoppedError(
            "the first node stopped the launch",
            found=answer.finding,
            fix=f"see {run_folder.FAILURES}",
            code=answer.finding.code,
        )
    return first


def first_wait(nodes: int) -> float:
    """Seconds before the first try: thousands at once would overflow the first node's queue (somaxconn).

    The kernel retries a dropped connection only after seconds.
    """
    return 0.0 if nodes <= _ONE_WAVE else jittered(nodes / _LOOKS_PER_S / 2)


def longer(pause: float, nodes: int) -> float:
    """The next pause between two tries: as short for a hundred nodes as for two, and longer for ten thousand."""
    return min(1.5 * pause, max(_PAUSE_S, min(_LONGEST_PAUSE_S, nodes / _LOOKS_PER_S)))


def jittered(pause: float) -> float:
    """The pause times a random factor from 0.5 to 1.5; importing `random` would cost more than all of this."""
    return pause * (0.5 + int.from_bytes(os.urandom(2), "big") / 65536)
