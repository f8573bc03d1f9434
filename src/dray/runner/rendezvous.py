"""All nodes find and check one another before anything is launched.

The first node binds a port and writes it to rendezvous.json; the others connect, prove the run's secret and say which
node they are and what they hold. The first node answers all at once: welcome, or what is wrong. So a missing node, a
second one with the same number or one with another plan or image stops the run early. `control` keeps the connections.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from dray import __version__
from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import ConfigError, DrayError, Finding, RetryError, UnfitError, listed
from dray.contract.ranges import compress_hosts
from dray.runner import records
from dray.runner.connections import BrokenError, Connection, Hello, Refusal, Server, Welcome, greet
from dray.runner.plan import Endpoint, Plan, World

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_BACKLOG = 65_535  # the kernel takes net.core.somaxconn at most, and who finds it full tries again
_BUSY_S = 5.0  # a run that is ending gives its port back within seconds
_LONGEST = 4096  # bytes of a file that somebody else may have written
_SHORTEST_SECRET = 32
_LOOKS_PER_S = 2000  # of all nodes together at the shared disk, and at the first node
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_TRY_S = 10.0  # to connect, and then to prove the secret to a first node that thousands reach at once
_LATER_S = 5.0  # for the first node's answer, whose own deadline may be later
_SHOWN = 20  # nodes in a message
_MOST_SKEW_S = 8.0
_HELD = {
    "plan": "put the run folder and HF_HOME on a disk that all nodes share, or at the same path on every machine",
    "dray": "use the same image on every node",
    "image": "copy the image to this node again, or put it on a disk that all nodes share",
}


class StoppedError(DrayError):
    """The run ends for a reason that another node has recorded, or that unfit nodes have."""


def secret_of(folder: str) -> bytes:
    """The run's secret, which was written beside plan.json."""
    path = f"{folder}/{run_folder.SECRET}"
    try:
        secret = files.read(path, limit=_LONGEST, own=True).strip()
        if len(secret) < _SHORTEST_SECRET:  # a disk was full: one that is short, anybody guesses
            raise OSError(f"{len(secret)} characters")
    except OSError as found:
        wanted = "the file that was written with plan.json"
        raise ConfigError("the run's secret cannot be read", where=path, wanted=wanted, found=found) from found
    return secret


def meet(plan: Plan, unfit: Finding | None = None) -> tuple[dict[int, Connection], Endpoint, socket.socket | None]:
    """Wait for all nodes; return the connections, the first node's address and port, and on it the listening socket.

    An `unfit` node comes too, so that all nodes hear of it at once, and none waits for a node that will not come.
    """
    several = len(plan.world.nodes) > 1
    key = secret_of(plan.folder) if several else b""
    own = make_hello(plan, unfit.problem if unfit else "")
    if plan.me:
        first = join(plan, own, key)
        return {0: first}, first.line.getpeername(), None
    listener = listen(plan.world)
    if several and plan.world.shared_folder:
        publish(plan, listener.getsockname())
    return gather(plan, own, key, listener), listener.getsockname(), listener


def listen(world: World) -> socket.socket:
    """A listening socket on the plan's port, or on a free one that the kernel chooses."""
    deadline, last = time.monotonic() + _BUSY_S, None
    for address in addresses(world):
        while True:
            try:
                return socket.create_server((address, world.port), backlog=_BACKLOG)
            except OSError as error:
                last = error
            if last.errno != errno.EADDRINUSE:  # a name may stand for an address that only others see
                break
            if time.monotonic() > deadline:
                raise RetryError(
                    f"port {world.port} is busy on {world.nodes[0].name}",
                    wanted=f"port {world.port} free on the first node",
                    found="another program listens there",
                    fix="remove `port` from the recipe, and dray takes a free one; or start the run again later",
                )
            time.sleep(0.2)
    raise UnfitError(
        "the first node has no address that the other nodes reach",
        wanted=f"{world.master} resolves to an address of the network between the nodes",
        found=last or f"it resolves to loopback, and no route leads to {world.nodes[1].name}",
        fix='set interfaces = ["NAME"] in the site file, with the name of the network interface between the nodes',
    )


def addresses(world: World) -> list[str]:
    """This node's addresses, the preferred one first; loopback for a run of one node."""
    found = []
    if len(world.nodes) == 1:
        return ["127.0.0.1"]
    # Machines of a hostfile reach one another by the file's names, and share no folder to learn another address from.
    if world.interfaces and world.shared_folder:
        return [interface_address(world.interfaces)]
    with suppress(OSError):
        found.append(socket.gethostbyname(world.master))
    with suppress(OSError):
        found.append(_route(world.nodes[1].address))
    # A name that its own machine resolves to loopback, as Debian's does, is another address for the others.
    return [address for address in found if not address.startswith("127.") or address == world.master]


def interface_address(names: Sequence[str]) -> str:
    """The address of the first of these interfaces that this node has."""
    for name in names:
        if address := _address(name):
            return address
    raise UnfitError(
        "the first node has none of the site's network interfaces",
        wanted=" or ".join(names),
        found=" ".join(name for _, name in socket.if_nameindex()),
        fix="correct `interfaces` in the site file, or ask for other nodes",
    )


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
        return socket.inet_ntoa(found[20:24])


def _route(other: str) -> str:
    """The address from which this node would reach the other; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((other, 9))
        return str(any_socket.getsockname()[0])


def gloo_interface(address: str) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME: the interface of this node's address in the rendezvous; empty if no interface has it.

    Without it gloo listens on the address of the host's name, which may be loopback.
    """
    if address.startswith("127."):  # all of them are loopback's, which has one
        return {"GLOO_SOCKET_IFNAME": "lo"}
    names = [name for _, name in socket.if_nameindex() if _address(name) == address]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def make_hello(plan: Plan, unfit: str = "") -> Hello:
    """This node's number and name, what all nodes must hold alike, and why its own check found it unfit."""
    return Hello(
        node=plan.me,
        name=plan.name,
        plan=plan.digest,
        image=os.environ.get(plan.world.identity.image, ""),
        dray=__version__,
        unfit=unfit,
        time=time.time(),
    )


def publish(plan: Plan, at: Endpoint) -> None:
    """Tell the other nodes where the first one listens."""
    told = json.dumps({"address": at[0], "port": at[1]})
    files.write_atomic(f"{plan.folder}/{run_folder.RENDEZVOUS}", told)


def published(plan: Plan) -> Endpoint:
    """The address and port of this attempt's first node. OSError: it has not written them yet."""
    if not plan.world.shared_folder:
        return plan.world.master, plan.world.port
    os.listdir(plan.folder)  # makes an NFS client ask again for a file that it remembers as missing
    told = json.loads(files.read(f"{plan.folder}/{run_folder.RENDEZVOUS}", limit=_LONGEST))
    return told["address"], told["port"]


def join(plan: Plan, own: Hello, key: bytes) -> Connection:
    """As any other node: the connection to the first one, once all nodes are there."""
    limit = plan.world.rendezvous_timeout_s
    deadline, wanted = time.monotonic() + limit, "the address of the first node"
    reason: Exception | None = None
    while True:
        try:
            host, port = published(plan)
            wanted = f"a connection to {host} port {port}"
            line = socket.create_connection((host, port), timeout=_TRY_S)
            first = greet(line, key, min(deadline, time.monotonic() + _TRY_S))
            break
        except (OSError, ValueError) as failed:  # not listening yet, name not there yet or none, another's
            if not isinstance(reason, BrokenError):  # what an end has done tells more than that there is none
                reason = failed
            if time.monotonic() > deadline:
                raise UnfitError(
                    f"node {own.node} ({own.name}) could not reach the first node in {limit} s",
                    wanted=wanted,
                    found=reason,
                    fix=f"see {run_folder.node_log(0)}: the first node may not have started, may have another secret, "
                    "or may be on a network that this node does not reach",
                ) from failed
        time.sleep(pause(len(plan.world.nodes)))
    try:
        first.send(own._replace(time=time.time()))
        # The first node knows who is missing. It may have come later, and so may its deadline.
        answer = first.receive_first(time.monotonic() + limit + _LATER_S)
    except OSError as failed:
        fix = f"see {run_folder.node_log(0)}, and start the run again"
        raise RetryError("the first node ended before all nodes had come", found=failed, fix=fix) from failed
    if isinstance(answer, Refusal):
        found, fix = answer.finding, f"see {run_folder.FAILURES}"
        raise StoppedError("the first node stopped the launch", found=found, fix=fix, code=found.code)
    return first


def pause(nodes: int) -> float:
    """Seconds between two tries, times a random factor from 0.5 to 1.5: thousands at once would overflow the first
    node's queue (somaxconn), and the kernel retries a dropped connection only after seconds.
    """
    factor = 0.5 + int.from_bytes(os.urandom(2), "big") / 65536  # importing `random` would cost more than all of this
    return factor * max(_PAUSE_S, min(_LONGEST_PAUSE_S, nodes / _LOOKS_PER_S))


def gather(plan: Plan, own: Hello, key: bytes, listener: socket.socket) -> dict[int, Connection]:
    """As the first node: the connections to all others, once all are here; or tell all why the run cannot start.

    If a node is unfit, the first node still waits for the checks of the others, so that all unfit nodes get named.
    These began at the same time, and get as long again.
    """
    server = Server(listener, key)
    limit = plan.world.rendezvous_timeout_s
    deadline = time.monotonic() + (limit / 2 if own.unfit else limit)
    came = {0: own}
    guests: list[tuple[int, Connection]] = []
    refusal: DrayError | None = None
    while not refusal and len(came) < len(plan.world.nodes) and time.monotonic() < deadline:
        server.accept()
        while server.proved:
            connection, message = server.proved.pop()
            hello = Hello(*message)
            guests.append((hello.node, connection))
            refusal = refusal or why_refused(hello, came)
            came[hello.node] = hello
            if hello.unfit:
                deadline = min(deadline, time.monotonic() + limit / 2)
    refusal = refusal or _incomplete(plan, came, listener.getsockname())
    for _, connection in guests:
        with suppress(OSError):  # it is gone, which is seen next
            connection.send(Refusal(refusal.finding) if refusal else Welcome())
        if refusal:
            connection.line.close()
    if refusal:
        raise refusal
    return dict(guests)


def _incomplete(plan: Plan, came: Mapping[int, Hello], at: Endpoint) -> DrayError | None:
    """The refusal for nodes that are missing, or unfit: each of these has recorded why."""
    nodes, limit = plan.names, plan.world.rendezvous_timeout_s
    absent = [name for number, name in enumerate(nodes) if number not in came]
    unfit = [hello for _, hello in sorted(came.items()) if hello.unfit]
    found = [f"{hello.name}: {hello.unfit}" for hello in unfit[:_SHOWN]]
    if absent:
        found.append(f"missing: {compress_hosts(absent)}")
    if unfit:
        failing = [hello.name for hello in unfit]
        records.put(f"{plan.folder}/{run_folder.FAILING_NODES}", ",".join(failing) + "\n")
        return StoppedError(
            f"{len(failing)} of {len(nodes)} nodes are unfit: {listed(failing, _SHOWN)}",
            wanted="nodes that pass the node check",
            found="\n".join(found),
            fix=f"leave them out: sbatch --exclude=$(cat {run_folder.FAILING_NODES})",
            code=exit_codes.UNFIT,
            node=failing[0],
        )
    if not absent:
        return None
    return UnfitError(
        f"{len(absent)} of {len(nodes)} nodes did not reach the first one in {limit} s",
        wanted=f"a connection of every node to {at[0]} port {at[1]}",
        found=found[0],
        fix="see the logs of these nodes; or give them more time: rendezvous_timeout_s=SECONDS",
    )


def why_refused(hello: Hello, came: Mapping[int, Hello]) -> DrayError | None:
    """Why a node that has come is refused, if it is."""
    who, own = f"node {hello.node} ({hello.name})", came[0]
    for held, fix in _HELD.items():
        wanted, found = getattr(own, held), getattr(hello, held)
        if found != wanted:
            return ConfigError(
                f"{who} has a different {held}",
                wanted=f"{held} {wanted[:12] or '(unknown)'}",
                found=f"{held} {found[:12] or '(unknown)'}",
                fix=fix,
            )
    if hello.node in came:
        return ConfigError(
            f"two nodes have the number {hello.node}",
            wanted="a number of its own for every node",
            found=f"{hello.name} has it too",
            fix="do not export the node's number before srun: each node takes it from its own task",
        )
    skew = abs(hello.time - time.time())
    if skew > _MOST_SKEW_S:
        return UnfitError(
            f"the clock of {who} is {skew:.0f} s away from the first node's",
            wanted=f"at most {_MOST_SKEW_S:.0f} s",
            fix="leave this node out (sbatch --exclude), and tell the cluster's administrators",
        )
    return None
