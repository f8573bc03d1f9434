"""Run a plan on this machine: every node is a process here (bare) or a container on a private network (docker)."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from dray import process, sites
from dray.environ import scratch
from dray.facts import Engine, Facts
from dray.plan import Plan
from dray.runs.network import containers
from dray.runs.paths import RunPaths
from dray.spec.recipe import Recipe

_GRACE = 10.0  # seconds that the other nodes get to end by themselves once one has failed


def facts(recipe: Recipe, *, engine: Engine, image: str, nodes: int | None, gpus_per_node: int, site: str) -> Facts:
    """What this machine offers: as many nodes as asked for, all of them here."""
    count = nodes or recipe.nodes
    on_loopback = engine not in ("docker", "podman")
    return Facts(
        scheduler="local",
        nodelist=f"node[1-{count}]" if count > 1 else "node1",
        nodes=count,
        address="127.0.0.1" if on_loopback else None,
        gpus_per_node=gpus_per_node,
        cpus_per_node=max(1, (os.cpu_count() or 1) // count),
        port=_free_port() if on_loopback else None,  # in a network of its own every port is free
        engine=engine,
        image=image,
        site=site,
        home=os.environ.get("HOME", ""),
        variables=sites.variables(site),
        uid=os.getuid(),
        gid=os.getgid(),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(plan: Plan, paths: RunPaths, *, watch: Callable[[], None], only: int | None = None) -> int:
    """Start every node, or only this one, and wait; `watch` is called between looks. The first failing node's code."""
    numbers = range(len(plan.world.nodes)) if only is None else [only]
    with ExitStack() as stack:
        stack.enter_context(process.stoppable())
        stack.callback(shutil.rmtree, scratch(plan.run), ignore_errors=True)
        if plan.engine in ("docker", "podman"):
            stack.enter_context(containers(plan))
        nodes = [stack.enter_context(_node(plan, paths, number)) for number in numbers]
        return _wait(nodes, watch)


def _wait(nodes: list[process.Running], watch: Callable[[], None]) -> int:
    deadline: float | None = None
    while True:
        watch()
        codes = [node.code() for node in nodes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            deadline = deadline or time.monotonic() + _GRACE
        if None not in codes or (deadline and time.monotonic() > deadline):
            return failed or 0
        nodes[codes.index(None)].wait(0.2)


@contextmanager
def _node(plan: Plan, paths: RunPaths, number: int) -> Iterator[process.Running]:
    names = plan.world.identity
    beside = len(plan.world.nodes) if plan.world.one_machine else 1
    me = {
        names["node"]: str(number),
        names["nodes"]: str(len(plan.world.nodes)),
        names["name"]: plan.world.nodes[number].name,
        names["cpus"]: str(max(1, len(os.sched_getaffinity(0)) // beside)),
    }
    with paths.node_log(number).open("ab") as log:
        node = process.start(["bash", paths.node_script], env={**os.environ, **me}, output=log)
    try:
        yield node
    finally:
        node.stop()
