"""Run a plan without Slurm: on this machine, as a process or a container for each node, or on those of a hostfile."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import engines, interrupts, process
from dray.clients import container_cleanup
from dray.config import dray_home, recipe_packages
from dray.config.image_definition import ACCELERATORS
from dray.config.recipe import Command, Preflight, Recipe
from dray.contract import files, node, processes
from dray.contract.findings import ConfigError, Finding, listed
from dray.contract.trainer import image_tasks
from dray.engines.docker import LABEL, network
from dray.facts import Engine, Facts
from dray.images import store
from dray.planning.schema import Plan
from dray.planning.world import port_of
from dray.runs import prepare
from dray.runs.active_run.logs import Output
from dray.runs.finish import finish
from dray.runs.store import RunPaths, foreign_path, new_id, newest_attempt, plan_of

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
    needed = {package.module: package.setting for package in recipe_packages.of(recipe)}
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


# One task in the image -----------------------------------------------------------------------------------------------

_HUB_VARIABLES = ("HF_ENDPOINT", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def trained_run(run: Path, *, trust: bool = False) -> tuple[Plan, RunPaths]:
    """The plan of a run of dray's trainer, and its newest attempt.

    For another user's run, settings that decide which code runs here are removed, unless you trust the run.
    """
    paths = newest_attempt(run)
    plan = plan_of(paths)
    recipe = plan.recipe
    if recipe.command:
        raise ConfigError(
            "this run started a command, and dray knows only the models of its own trainer",
            where=paths.run,
            wanted="a run of a recipe with [train]",
            found=f"the command {recipe.command.argv[0]}",
            fix="load the model with your own program",
        )
    found = "" if trust else foreign_path(paths)
    if found:
        ignored = Finding(
            "the run is another user's, so its env, pass_env, layer and trust_remote_code are ignored",
            found=found,
            fix="--trust-run uses them: code of that user then runs as you",
        )
        print(f"dray: {ignored.level}: {ignored}", file=sys.stderr)
        recipe = recipe.with_values("model", trust_remote_code=False)
        plan = plan.model_copy(update={"recipe": recipe.model_copy(update={"env": {}, "pass_env": (), "layer": None})})
    return plan, paths


def ended_run(run: Path, *, trust: bool = False) -> tuple[Plan, Path]:
    """The plan of an ended run, and the folder of its final model."""
    plan, paths = trained_run(run, trust=trust)
    if not paths.final_model.is_dir():
        raise ConfigError(
            "the run has no final model",
            where=paths.final_model,
            found="a run that has not ended",
            fix="let it end: with checkpoint.folder set, the same command resumes from its checkpoints",
        )
    links = [path for path in paths.final_model.rglob("*") if path.is_symlink()]
    if links and not trust and foreign_path(paths):
        raise ConfigError(
            "links in another user's model may lead to your own files",
            where=links[0],
            found=f"a link to {links[0].readlink()}",
            fix="copy the run with cp -rL, or use --trust-run",
        )
    return plan, paths.final_model


def hub_variables() -> tuple[str, ...]:
    """The names of the variables for reaching the hub that are set; their values are passed by name."""
    return tuple(name for name in ("HF_TOKEN", *_HUB_VARIABLES) if name in os.environ)


def run_in_image(
    recipe: Recipe,
    job: image_tasks.Job,
    *,
    engine: Engine,
    folder: Path,
    env: Mapping[str, str] | None = None,
    sections: Sequence[str] = (),
    by_gpu: bool = False,
) -> int:
    """Run one job of contract/trainer/image_tasks.py and show its output as it comes; its exit code.

    The job is a run of one rank in `folder` that leaves no run folder. Python imports nothing from `folder`, which may
    be another user's model. The container sees `folder` and the files that the recipe's `sections` name. With `by_gpu`
    it also sees a GPU, if this machine has the kind that the recipe's image is for.
    """
    environment = {**recipe.env, **(env or {}), "PYTHONSAFEPATH": "1"}
    gpus = int(by_gpu and node.has_gpu(ACCELERATORS[recipe.image]))
    here = facts(recipe, engine=engine, nodes=1, gpus_per_node=gpus, site="")
    visible = recipe.with_values("data", streaming=False)  # as in training
    with TemporaryDirectory(prefix="dray-") as runs:
        name = new_id(recipe.name)
        file = Path(runs, name, "job.json")
        program = Recipe(
            name=recipe.name,
            image=recipe.image if gpus else "cpu",
            launcher="python",
            ranks_per_node=1,
            env=environment,
            pass_env=tuple(name for name in recipe.pass_env if name not in environment),
            preflight=Preflight(when="never"),
            command=Command(
                argv=(engines.get(engine).python(here.image), "-m", "dray.train.outputs", str(file)),
                folder=str(folder),
            ),
        ).model_copy(update={name: getattr(visible, name) for name in sections})
        plan, paths = prepare.write(program, here, runs=Path(runs), run=name)
        file.write_text(json.dumps(image_tasks.to_json(job)), encoding="utf-8")
        output = Output(paths.rank_log(0))
        code = run(plan, paths, watch=output.look)
        output.look()
        result = finish(paths, code=code)
        if result.cause and output.empty:  # the job never started
            print("\n".join(result.cause.last_lines), file=sys.stderr)
        return result.exit_code


# Machines of a hostfile ----------------------------------------------------------------------------------------------

_SECRET_LENGTH = 32
_NEW_SECRET = "(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > ~/.dray-secret)"  # noqa: S105  a line to type
_HOST_LINE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}( slots=[1-9][0-9]{0,3})?")
_HOSTFILE_FORM = (
    "a line for each machine: its name or IPv4 address, and the same slots=N on all lines, or none: `box1 slots=8`"
)


@dataclass(frozen=True)
class Hosts:
    """The machines in the file's order; the first is the master. Each finds its own line; nothing uses SSH."""

    file: Path
    names: tuple[str, ...]
    slots: int | None

    def here(self, number: int | None = None) -> int:
        """The number of this machine in the file."""
        own = socket.gethostname().partition(".")[0]
        lines = [line for line, name in enumerate(self.names) if name.partition(".")[0] == own]
        if number is not None:
            lines = [number]
        if len(lines) != 1 or not 0 <= lines[0] < len(self.names):
            raise ConfigError(
                "it is not clear which line of the hostfile is this machine",
                where=self.file,
                wanted=f"one line with the name {own}, or --node",
                fix=f"name this machine's line: --node 0 for the first, up to {len(self.names) - 1}",
            )
        return lines[0]

    def facts(self, recipe: Recipe, *, run: str, engine: Engine, gpus_per_node: int, site: str) -> Facts:
        """The facts for the plan, which must be the same on each machine."""
        here = facts(
            recipe,
            engine=engine,
            nodes=len(self.names),
            gpus_per_node=gpus_per_node or self.slots or 0,
            site=site,
        )
        return here.model_copy(
            update={
                "scheduler": "hosts",
                "nodelist": ",".join(self.names),
                "address": None,
                "hf_home": here.hf_home if engines.get(engine).isolates_env else None,  # else each machine has its own
                "port": port_of(run),
            }
        )

    def secret(self, file: Path | None) -> str:
        """The secret that the machines share, from a file that each has; empty for a single machine."""
        if file is None and len(self.names) == 1:
            return ""
        if file is None:
            raise ConfigError(
                "a run on several machines needs a secret: without it anyone on the network could join or stop the run",
                where=self.file,
                wanted="--secret FILE, with the same content on each machine",
                fix=f"{_NEW_SECRET}, then copy it to each machine and add --secret ~/.dray-secret",
            )
        secret, mode = files.text(file, "the secret", fix=_NEW_SECRET).strip(), file.stat().st_mode & 0o777
        if mode & 0o077 or len(secret) < _SECRET_LENGTH or not secret.isascii():
            raise ConfigError(
                "the secret is weak",
                where=file,
                wanted=f"a file of mode 600 with at least {_SECRET_LENGTH} random letters and digits",
                found=f"mode {mode:o}, {len(secret)} characters",
                fix=f"{shlex.join(['chmod', '600', str(file)])}; or make a new one: {_NEW_SECRET}",
            )
        return secret


def read_hostfile(path: Path) -> Hosts:
    """The hostfile, in the form that DeepSpeed and MPI use too."""
    lines = [" ".join(line.partition("#")[0].split()) for line in files.text(path, "the hostfile").splitlines()]
    lines = [line for line in lines if line]
    names = [line.partition(" ")[0] for line in lines]
    slots = {line.partition(" slots=")[2] for line in lines}
    if not all(map(_HOST_LINE.fullmatch, lines)) or len({*names}) < len(names) or len(slots) != 1:
        raise ConfigError(
            "the hostfile is not valid", where=path, wanted=_HOSTFILE_FORM, found=ascii(listed(lines))[:300]
        )
    return Hosts(path, tuple(names), int(slots.pop() or 0) or None)
