"""Thousands of nodes meet: the first node's own code in one process, all others in another."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

from crowd import Crowd, Node, Stranger
from table import Row, fit

from dray.contract.findings import DrayError
from dray.runner.plan import Identity, Plan, World, of
from dray.runner.rendezvous import gather, listen, make_hello

KEY = b"5ec2e7" * 8
SIZES = (2, 64, 1024, 10_000)
STRANGERS = 400
_MIB = 1024  # ru_maxrss counts KiB


def rows() -> list[Row]:
    """Seconds from the first connection to the last answer, and the first node's memory."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    found, points = [], []
    for count in SIZES:
        took, told = _meet(count)
        points.append((float(count), took))
        found.append(Row("rendezvous", count, took, "s", 10))
        found.append(Row("  first node's memory", count, told["mib"], "MiB", 200))
        found.append(Row("  first node's CPU", count, told["cpu"], "s", 10))
    print(f"seconds = {fit(points)}")
    many = SIZES[-1]
    took, told = _meet(many, strangers=STRANGERS)
    found.append(Row(f"rendezvous, {STRANGERS} strangers", many, took, "s", 10))
    found.append(Row("  first node's memory", many, told["mib"], "MiB", 200))
    _, told = _meet(many, absent=many // 2, limit=30)
    print(f"one unreachable: {told['said']}")
    if "missing: n5000\n" not in f"{told['said']}\n":
        sys.exit("the one that is missing is not named")
    return found


def _plan(count: int, limit: float) -> Plan:
    world = dict.fromkeys(World._fields, 0) | {
        "nodes": [{"name": f"n{number}", "address": "127.0.0.1"} for number in range(count)],
        "ranks_per_node": 8,
        "master": "127.0.0.1",
        "interfaces": [],
        "rendezvous_timeout_s": int(limit),
        "cores": [],
        "shared_folder": True,
        "identity": dict.fromkeys(Identity._fields, "DRAY_IMAGE_ID"),
    }
    text = dict.fromkeys(("run", "folder", "scratch", "variant", "where"), "/nonexistent")
    lists = {name: [] for name in ("launcher", "command", "env", "pass_env")}
    recipe = {"pass_env": []}
    plan = of({**text, **lists, "attempt": 1, "world": world, "recipe": recipe})
    return plan._replace(digest="")  # all nodes have one plan, but for the limit


def _meet(count: int, *, strangers: int = 0, absent: int = 0, limit: float = 60) -> tuple[float, dict[str, Any]]:
    server = [sys.executable, __file__, str(count), str(limit / 2)]
    with subprocess.Popen(server, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as first:  # noqa: S603
        assert first.stdout
        assert first.stdin
        port = int(first.stdout.readline())
        try:
            took = _come(port, count, limit, strangers=strangers, absent=absent)
        except TimeoutError:
            first.kill()
            sys.exit(f"{count} nodes did not meet in {limit} s")
        first.stdin.close()
        return took, json.loads(first.stdout.readline())


def _come(port: int, count: int, limit: float, *, strangers: int, absent: int) -> float:
    hello = make_hello(_plan(count, 1))
    crowd = Crowd(port, KEY)
    for number in range(strangers):
        Stranger(crowd, number)
    begun = time.perf_counter()
    nodes = [Node(crowd, number, count, hello) for number in range(1, count) if number != absent]
    left = iter(nodes)
    waits_for = next(left)

    def over() -> bool:
        nonlocal waits_for
        while waits_for.told:
            if not (following := next(left, None)):
                return True
            waits_for = following
        return False

    crowd.until(over, limit)
    took = time.perf_counter() - begun
    told = {node.told for node in nodes}
    if told != {"Refusal" if absent else "Welcome"}:
        sys.exit(f"nodes were told {sorted(told)}")
    return took


def _first(count: int, limit: float) -> None:
    """The process that is the first node."""
    plan = _plan(count, limit)
    listener, told = listen(plan.world), {}
    print(listener.getsockname()[1], flush=True)
    own = make_hello(plan)
    try:
        gather(plan, own, KEY, listener)
    except DrayError as error:
        told["said"] = str(error)
    used = resource.getrusage(resource.RUSAGE_SELF)
    told |= {"mib": used.ru_maxrss / _MIB, "cpu": used.ru_utime + used.ru_stime}
    sys.stdin.read()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _first(int(sys.argv[1]), float(sys.argv[2]))
