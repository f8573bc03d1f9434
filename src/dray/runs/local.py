"""Run a plan on this machine: each node is a process (bare) or a container on a private network (docker)."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from dray import engines, interrupts, process
from dray.clients import container_cleanup
from dray.config import dray_home, requirements
from dray.config.recipe import Recipe
from dray.contract import files, processes
from dray.contract.findings import ConfigError
from dray.engines.docker import LABEL, network
from dray.facts import Engine, Facts
from dray.images import store
from dray.planning.schema import Plan
from dray.runs.store import RunPaths

_GRACE_S = 10.0  # for the other nodes to end by themselves after one has failed


def facts(
    recipe: Recipe, *, engine: Engine, image: str = "", nodes: int | None, gpus_per_node: int, site: str
) -> Facts:
    """The facts of this machine, with the requested number of nodes, all on it."""
    count, image = nodes or recipe.nodes, image or image_of(engine, recipe)
    return Facts(
        scheduler="local",
        nodelist=f"node[1-{count}]" if count > 1 else "node1",
        nodes=count,
        address=None if engines.get(engine).private_network else "127.0.0.1",
        gpus_per_node=gpus_per_node,
        engine=engine,
        image=image,
        **store.described(Path(image)),
        site=site,
        home=os.environ.get("HOME", ""),
        hf_home=hf_home(),
        uid=os.getuid(),
        gid=os.getgid(),
        shell=dict(os.environ),
    )


def image_of(engine: Engine, recipe: Recipe) -> str:
    """The image that this engine starts for the recipe; for bare, a Python with the training packages."""
    kind = engines.get(engine).image
    if kind == "file":
        return str(store.required(dray_home.root(), recipe.image_name, recipe.image_digest, engine).absolute())
    return store.bare_python() if kind == "python" else store.in_engine(engine, recipe.image)


def hf_home() -> str | None:
    """HF_HOME of the job, or the library's default folder if it exists (slurm/job.sh does the same)."""
    folder = os.environ.get("HF_HOME", "")
    if not folder and hub_cache().is_dir():
        folder = str(hub_cache())
    return folder if folder.startswith("/") else None


def hub_cache() -> Path:
    """The default download folder of the Hugging Face libraries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or dray_home.home() / ".cache", "huggingface")


def require(recipe: Recipe) -> None:
    """Refuse a recipe whose packages this Python lacks."""
    needed = {package.module: package.setting for package in requirements.of(recipe)}
    missing = [module for module in needed if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"the recipe needs {' and '.join(missing)}, which this Python does not have",
            where=sys.executable,
            wanted="\n".join(f"{module}, for {needed[module]}" for module in missing),
            fix=f"dray image build {recipe.image} --format docker, then the same command with --engine docker",
        )


def run(
    plan: Plan,
    paths: RunPaths,
    *,
    watch: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
    only: int | None = None,
) -> int:
    """Start every node, or only this one, and wait; the exit code of the first node that failed.

    `watch` is called while waiting, and `stopping` before an interrupt ends the nodes.
    """
    numbers = range(len(plan.world.nodes)) if only is None else [only]
    with ExitStack() as stack:
        stack.enter_context(interrupts.stoppable())
        stack.callback(shutil.rmtree, plan.scratch, ignore_errors=True)
        if not only:  # with a hostfile only the first machine, whose runner is asked to stop
            files.write_atomic(paths.process, json.dumps(processes.mark(os.getpid())))
        if engines.get(plan.engine).private_network:
            private = network(plan.run) if plan.world.one_machine else None
            stack.enter_context(
                container_cleanup.removed_after(plan.engine, label=f"{LABEL}={plan.run}", network=private)
            )
        nodes = [stack.enter_context(_node(plan, paths, number)) for number in numbers]
        try:
            return _wait(nodes, watch)
        except KeyboardInterrupt:
            interrupts.hurry_on_signals()
            stopping()
            raise


def _wait(nodes: list[process.Running], watch: Callable[[], None]) -> int:
    deadline: float | None = None
    while True:
        watch()
        codes = [node.code() for node in nodes]
        failed = next((code for code in codes if code), 0)
        if failed and deadline is None:
            deadline = time.monotonic() + _GRACE_S
        if None not in codes or (deadline and time.monotonic() > deadline):
            return failed
        nodes[codes.index(None)].wait(0.2)


@contextmanager
def _node(plan: Plan, paths: RunPaths, number: int) -> Iterator[process.Running]:
    names = plan.world.identity
    nodes = plan.world.nodes
    cpus = len(os.sched_getaffinity(0)) // (len(nodes) if plan.world.one_machine else 1)
    # Inside a job, the shell's SLURM_ variables describe its own task, not these nodes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {
        names["node"]: str(number),
        names["nodes"]: str(len(nodes)),
        names["name"]: nodes[number].name,
        names["cpus"]: str(max(1, cpus)),
    }
    with paths.node_log(number).open("ab") as log:
        node = process.start(["bash", paths.node_script], env=environment, output=log)
    try:
        yield node
    finally:
        node.stop()
