"""All nodes meet at the master before anything is launched, on the very address and port that training will use.

Each node sends one line of JSON: who it is and what it holds. The master answers all at once: go, and at which
address, or stop and why. So a node that never comes, comes twice or holds something else stops the run in time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from dray import __version__
from dray.contract.findings import ConfigError, DrayError, RetryError, UnfitError

_MOST_SKEW_S = 8.0  # beyond what a stranger at the door can hold up the others
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


class StoppedError(DrayError):
    """The first node has refused the launch, and recorded why."""


def meet(world: Mapping[str, Any], number: int, digest: str) -> str:
    """Come back when every node of the plan is there, with the master's address; raise what the master found else."""
    if len(world["nodes"]) == 1:
        _listen(world).close()  # nobody to meet, but training will need the port
        return address(world)
    deadline = time.monotonic() + world["meet_within"]
    mine = {
        "node": number,
        "name": world["nodes"][number]["name"],
        "host": os.uname().nodename,
        "plan": digest,
        "image": os.environ.get(world["identity"]["image"], ""),
        "dray": __version__,
        "time": time.time(),
    }
    return _host(world, mine, deadline) if number == 0 else _join(world, mine, deadline)


def address(world: Mapping[str, Any]) -> str:
    """This node's address on the first of the site's interfaces that it has, or else what the plan calls it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in world["interfaces"]:
            try:
                found = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                return socket.inet_ntoa(found[20:24])
            except OSError:
                continue
    if world["interfaces"]:
        raise UnfitError(
            "the first node has none of the site's network interfaces",
            wanted=" or ".join(world["interfaces"]),
            found=" ".join(name for _, name in socket.if_nameindex()),
            fix="correct `interfaces` in the site's file, or ask for other nodes",
        )
    return str(world["master"])


def _host(world: Mapping[str, Any], mine: Mapping[str, Any], deadline: float) -> str:
    nodes, hosts, master = world["nodes"], {mine["host"]: mine["name"]}, address(world)
    guests: dict[int, socket.socket] = {}
    waiting: list[socket.socket] = []  # also one that says another's number, which is told so
    refusal: DrayError | None = None
    with _listen(world) as door:
        while refusal is None and len(guests) < len(nodes) - 1:
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                guest, _ = door.accept()
            except TimeoutError:
                refusal = _missing(world, guests)
                break
            hello = _receive(guest, within=5.0)
            if hello is None or hello.keys() != mine.keys():  # a stranger, or a node that died while it spoke
                guest.close()
                continue
            twin = None if world["one_machine"] else hosts.get(hello["host"])
            refusal = _odd(hello, {**mine, "time": time.time()}, guests, twin)
            hosts[hello["host"]] = hello["name"]
            guests[hello["node"]] = guest
            waiting.append(guest)
    answer = {"go": True, "master": master}
    if refusal is not None:
        answer = {"go": False, "code": refusal.finding.code, "why": str(refusal)}
    for guest in waiting:
        with guest:
            guest.sendall(json.dumps(answer).encode() + b"\n")
    if refusal is not None:
        raise refusal
    return master


def _listen(world: Mapping[str, Any]) -> socket.socket:
    try:
        return socket.create_server(("", world["port"]), backlog=len(world["nodes"]))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise RetryError(
            f"port {world['port']} is busy on {world['nodes'][0]['name']}",
            wanted=f"port {world['port']} free on the first node",
            found="another program listens there",
            fix="submit again (the port follows the job's number), or set `port` in the recipe",
        ) from error


def _join(world: Mapping[str, Any], mine: Mapping[str, Any], deadline: float) -> str:
    place = (world["master"], world["port"])
    while True:
        try:
            with socket.create_connection(place, timeout=max(0.01, deadline - time.monotonic())) as line:
                line.sendall(json.dumps({**mine, "time": time.time()}).encode() + b"\n")
                # The master knows who is missing. It may have come later than this node, and so may its deadline.
                answer = _receive(line, within=world["meet_within"] + 5.0)
                if answer is not None:
                    break
                reason = "the master closed the line"
        except OSError as error:  # not listening yet, name not there yet
            reason = str(error)
        if time.monotonic() >= deadline:
            raise UnfitError(
                f"node {mine['node']} ({mine['name']}) could not meet the master in {world['meet_within']} s",
                wanted=f"a line to {place[0]} port {place[1]}",
                found=reason,
                fix="see logs/node-0.log: did the first node start? can the nodes reach each other by this name?",
            )
        time.sleep(0.05)
    if not answer["go"]:
        raise StoppedError(
            "the master stopped the launch",
            wanted="go",
            found=answer["why"],
            fix="see failures/node-0.json",
            code=answer["code"],
        )
    return str(answer["master"])


def _receive(line: socket.socket, *, within: float) -> dict[str, Any] | None:
    line.settimeout(max(0.01, within))
    with line.makefile("rb") as reader:
        try:
            said = json.loads(reader.readline(65536))
        except (ValueError, OSError):
            return None
    return said if isinstance(said, dict) else None


def _odd(
    hello: Mapping[str, Any], mine: Mapping[str, Any], guests: Mapping[int, object], twin: str | None
) -> DrayError | None:
    """What is wrong with a node that has come. `mine` is what the master holds, at the time at which it came."""
    who = f"node {hello['node']} ({hello['name']})"
    if hello["node"] in guests or hello["node"] == mine["node"]:
        return ConfigError(
            f"two nodes believe that they are node {hello['node']}",
            wanted="every node has its own number",
            found=f"{hello['name']} is the second one",
            fix="the node's number must come from each node's own task; do not export it before srun",
        )
    if twin:
        return ConfigError(
            f"{who} and {twin} have the same host name",
            wanted="nodes of different host names: libraries tell nodes apart by them",
            found=hello["host"],
            fix="give the machines names of their own; or were two tasks started on one node?",
        )
    skew = abs(hello["time"] - mine["time"])
    if skew > _MOST_SKEW_S:
        return UnfitError(
            f"the clock of {who} is {skew:.0f} s away from the first node's",
            wanted=f"at most {_MOST_SKEW_S:.0f} s",
            found=f"{skew:.0f} s",
            fix="leave this node out (sbatch --exclude), and tell the cluster's administrators",
        )
    for held, fix in (
        (
            "plan",
            "the run folder must be on a disk that all nodes share, or at the same path on every machine; HF_HOME too",
        ),
        ("dray", "the same image on every node"),
        ("image", "copy the image to this node again, or put it on a disk that all nodes share"),
    ):
        if hello[held] != mine[held]:
            return ConfigError(
                f"{who} holds another {held}",
                wanted=f"{held} {mine[held][:12] or '(unknown)'}",
                found=f"{held} {hello[held][:12] or '(unknown)'}",
                fix=fix,
            )
    return None


def _missing(world: Mapping[str, Any], guests: Mapping[int, object]) -> UnfitError:
    absent = [node["name"] for number, node in enumerate(world["nodes"]) if number not in guests and number != 0]
    return UnfitError(
        f"{len(absent)} of {len(world['nodes'])} nodes did not come in {world['meet_within']} s",
        wanted=f"all nodes at {world['master']} port {world['port']}",
        found=f"missing: {' '.join(absent[:20])}{' ...' if len(absent) > 20 else ''}",
        fix="see the logs of these nodes; `meet_within` in the recipe is the time they are given",
    )
