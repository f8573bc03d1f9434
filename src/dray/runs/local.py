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

_GRACE = 10.0  # seconds for the other nodes to end by themselves after one has failed


def facts(recipe: Recipe, *, engine: Engine, image: str, nodes: int | None, gpus_per_node: int, site: str) -> Facts:
    """The facts of this machine, with the requested number of nodes, all on it."""
    count = nodes or recipe.nodes
    on_loopback = not engines.get(engine).private_network
    return Facts(
        scheduler="local",
        nodelist=f"node[1-{count}]" if count > 1 else "node1",
        nodes=count,
        address="127.0.0.1" if on_loopback else None,
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


def require(recipe: Recipe, again: Callable[..., str], *, fixed: bool = False) -> None:
    """Refuse a recipe whose packages this Python lacks. `again` makes the user's command line with more options.

    With `fixed`, as for a replay, the fix changes no settings.
    """
    missing = [one for one in requirements.of(recipe) if find_spec(one.module) is None]
    build = f"dray image build {recipe.image} --format docker"
    if missing:
        names = " and ".join(dict.fromkeys(one.module for one in missing))
        other = [again(*dict.fromkeys(word for one in missing for word in one.without)) + f"  # without {names}"]
        raise ConfigError(
            f"the recipe needs {names}, which this Python does not have",
            where=sys.executable,
            wanted="\n".join(f"{one.module}, for {one.setting}" for one in missing),
            found="not installed; an image has everything that a recipe needs",
            fix="\n".join(
                [
                    *(other if not fixed and all(one.without for one in missing) else []),
                    f"{again('--engine', 'docker')}  # in the image, after {build}",
                ]
            ),
        )
    torch = find_spec("torch")
    if recipe.train and recipe.train.compile is True and torch and any(map(str.isspace, torch.origin or "")):
        raise ConfigError(
            "torch.compile fails if torch's path contains a space",
            where=torch.origin,
            wanted="a path without a space: Inductor passes it unquoted to the C++ compiler",
            found="train.compile = true",
            fix="\n".join(
                [
                    *([] if fixed else [again("train.compile=false")]),
                    f"{again('--engine', 'docker')}  # in the image, after {build}",
                ]
            ),
        )


def hf_home() -> str | None:
    """HF_HOME of the job, or the library's default folder if it exists (slurm/lib.sh does the same)."""
    if named := os.environ.get("HF_HOME"):
        return named if named.startswith("/") else None
    usual = hub_cache()
    return str(usual) if usual.is_dir() else None


def hub_cache() -> Path:
    """The default download folder of the Hugging Face libraries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or dray_home.home() / ".cache", "huggingface")


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
            label = f"{LABEL}={plan.run}"
            stack.enter_context(container_cleanup.removed_after(plan.engine, label=label, network=private))
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
        # Inside a job, the shell's SLURM_ variables describe its own task, not these nodes.
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        node = process.start(["bash", paths.node_script], env={**own, **me}, output=log)
    try:
        yield node
    finally:
        node.stop()
