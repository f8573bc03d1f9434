"""Run a plan on this machine: every node is a process here (bare) or a container on a private network (docker)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

from docker.errors import APIError

from dray import dockerd, process
from dray.engines.docker import LABEL, network
from dray.errors import UnfitError
from dray.facts import Engine, Facts
from dray.plan import Plan
from dray.runs.paths import RunPaths
from dray.spec.recipe import Recipe

_GRACE = 10.0  # seconds that the other nodes get to end by themselves once one has failed


def facts(recipe: Recipe, *, engine: Engine, image: str, nodes: int | None, gpus_per_node: int) -> Facts:
    """What this machine offers: as many nodes as asked for, all of them here."""
    count = nodes or recipe.nodes
    on_loopback = engine == "bare"
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
        uid=os.getuid(),
        gid=os.getgid(),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(plan: Plan, paths: RunPaths, *, watch: Callable[[], None]) -> int:
    """Start every node and wait; `watch` is called between looks. The exit code is the first failing node's."""
    with ExitStack() as stack:
        stack.enter_context(process.stoppable())
        if plan.engine == "docker":
            stack.enter_context(_private_network(plan))
        nodes = [stack.enter_context(_node(plan, paths, number)) for number in range(len(plan.world.nodes))]
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
    me = {
        names["node"]: str(number),
        names["nodes"]: str(len(plan.world.nodes)),
        names["name"]: plan.world.nodes[number].name,
    }
    with paths.node_log(number).open("ab") as log:
        node = process.start(["bash", paths.node_script], env={**os.environ, **me}, output=log)
    try:
        yield node
    finally:
        node.stop()


@contextmanager
def _private_network(plan: Plan) -> Iterator[None]:
    if process.which("docker") is None:
        raise UnfitError("the docker program is not on this machine", fix="install Docker's client, docker-cli")
    with closing(dockerd.client()) as client:
        with dockerd.doing("make a private network"):
            made = client.networks.create(network(plan), labels={LABEL: plan.run})
        try:
            yield
        finally:
            with dockerd.doing("take the private network down"):
                for container in client.containers.list(
                    all=True, ignore_removed=True, filters={"label": f"{LABEL}={plan.run}"}
                ):
                    with suppress(APIError):  # it ends by itself at this very moment
                        container.remove(force=True)
                made.remove()
