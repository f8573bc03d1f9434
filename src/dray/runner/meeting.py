"""All nodes meet at the master before anything is launched, on the very address and port that training will use.

Each node sends one line of JSON: its number, its name, its plan's digest. The master answers all at once: go, or
stop and why. So a node that never comes, comes twice or holds another plan stops the run in the deadline.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from dray.runner.record import Refusal

_UNFIT, _RETRY, _CONFIG = 69, 75, 78


def meet(world: Mapping[str, Any], number: int, digest: str) -> None:
    """Come back when every node of the plan is there; raise what the master found otherwise."""
    if len(world["nodes"]) == 1:
        _listen(world).close()  # nobody to meet, but training will need the port
        return
    deadline = time.monotonic() + world["meet_within"]
    mine = {"node": number, "name": world["nodes"][number]["name"], "plan": digest}
    if number == 0:
        _host(world, mine, deadline)
    else:
        _join(world, mine, deadline)


def _host(world: Mapping[str, Any], mine: Mapping[str, Any], deadline: float) -> None:
    nodes = world["nodes"]
    guests: dict[int, socket.socket] = {}
    refusal = None
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
            refusal = _odd(hello, mine, guests)
            guests[hello["node"]] = guest
    answer = {"go": True} if refusal is None else {"go": False, "code": refusal.code, "why": str(refusal)}
    for guest in guests.values():
        with guest:
            guest.sendall(json.dumps(answer).encode() + b"\n")
    if refusal is not None:
        raise refusal


def _listen(world: Mapping[str, Any]) -> socket.socket:
    try:
        return socket.create_server(("", world["port"]), backlog=len(world["nodes"]))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Refusal(
            _RETRY,
            f"port {world['port']} is busy on {world['nodes'][0]['name']}",
            wanted=f"port {world['port']} free on the first node",
            found="another program listens there",
            fix="submit again (the port follows the job's number), or set `port` in the recipe",
        ) from error


def _join(world: Mapping[str, Any], mine: Mapping[str, Any], deadline: float) -> None:
    place = (world["master"], world["port"])
    while True:
        try:
            with socket.create_connection(place, timeout=max(0.01, deadline - time.monotonic())) as line:
                line.sendall(json.dumps(mine).encode() + b"\n")
                # The master knows who is missing. It may have come later than this node, and so may its deadline.
                answer = _receive(line, within=world["meet_within"] + 5.0)
                if answer is not None:
                    break
                reason = "the master closed the line"
        except OSError as error:  # not listening yet, name not there yet
            reason = str(error)
        if time.monotonic() >= deadline:
            raise Refusal(
                _UNFIT,
                f"node {mine['node']} ({mine['name']}) could not meet the master in {world['meet_within']} s",
                wanted=f"a line to {place[0]} port {place[1]}",
                found=reason,
                fix="see logs/node-0.log: did the first node start? can the nodes reach each other by this name?",
            )
        time.sleep(0.05)
    if not answer["go"]:
        raise Refusal(
            answer["code"],
            "the master stopped the launch",
            wanted="go",
            found=answer["why"],
            fix="see failures/node-0.json",
            recorded=True,
        )


def _receive(line: socket.socket, *, within: float) -> dict[str, Any] | None:
    line.settimeout(max(0.01, within))
    with line.makefile("rb") as reader:
        try:
            said = json.loads(reader.readline(65536))
        except (ValueError, OSError):
            return None
    return said if isinstance(said, dict) else None


def _odd(hello: Mapping[str, Any], mine: Mapping[str, Any], guests: Mapping[int, object]) -> Refusal | None:
    if hello["node"] in guests or hello["node"] == mine["node"]:
        return Refusal(
            _CONFIG,
            f"two nodes believe that they are node {hello['node']}",
            wanted="every node has its own number",
            found=f"{hello['name']} is the second one",
            fix="the node's number must come from each node's own task; do not export it before srun",
        )
    if hello["plan"] != mine["plan"]:
        return Refusal(
            _CONFIG,
            f"node {hello['node']} ({hello['name']}) holds another plan",
            wanted=f"plan {mine['plan'][:12]}",
            found=f"plan {hello['plan'][:12]}",
            fix="the run folder must be on a disk that all nodes share",
        )
    return None


def _missing(world: Mapping[str, Any], guests: Mapping[int, object]) -> Refusal:
    absent = [node["name"] for number, node in enumerate(world["nodes"]) if number not in guests and number != 0]
    return Refusal(
        _UNFIT,
        f"{len(absent)} of {len(world['nodes'])} nodes did not come in {world['meet_within']} s",
        wanted=f"all nodes at {world['master']} port {world['port']}",
        found=f"missing: {' '.join(absent[:20])}{' ...' if len(absent) > 20 else ''}",
        fix="see the logs of these nodes; `meet_within` in the recipe is the time they are given",
    )
