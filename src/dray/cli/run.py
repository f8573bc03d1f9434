"""Start a run: plan it, run it on this machine, or submit it to Slurm."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray import engines, facts, process, render
from dray.cli.args import (
    Arguments,
    Chosen,
    Engine,
    GpuMemory,
    GpusPerNode,
    Here,
    Json,
    Nodes,
    On,
    Ranks,
    RunName,
    Runs,
    Sbatch,
    Site,
    chosen,
    program,
    refuse_or_warn,
    typed,
)  # fmt: skip
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError, counted
from dray.images import store
from dray.planning.schema import Plan
from dray.runs import metrics, prepare
from dray.runs.result import summary
from dray.runs.slurm import Allocation, allocation_environment
from dray.runs.store import RunPaths, default_runs, new_id, next_attempt, run_named

if TYPE_CHECKING:
    from dray.cli.runs import Steps
    from dray.runs.active_run.logs import Output

_MORE = "-v shows all: each environment variable and bind with its source, and what runs on each node"


def plan(
    context: typer.Context,
    arguments: Arguments = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    as_json: Json = False,
    verbose: bool = False,
    gpu_memory: GpuMemory = None,
    site: Site = "",
    sbatch: Sbatch = None,
    runs: Runs = None,
    write: bool = False,
    run: Annotated[str | None, typer.Option(hidden=True, help="Name of the run that dray submit began.")] = None,
) -> None:
    """Print in ten lines what would run, without starting it; -v prints everything, with the source of each value.

    --verbose, -v: Print the whole plan.
    --write: For the batch script: read facts, write the attempt's folder and print its path, or ask.

    dray plan recipes/smoke-cpu.toml --nodes 4 batch.global_size=32
    dray plan recipes/smoke-cpu.toml --site lumi -N4 image=rocm -v
    """
    from dray.runs import submit

    folder = (runs or default_runs()).absolute()
    asked = chosen(arguments, context, ranks, gpus_per_node, run_named(folder, run or ""))
    recipe = asked.recipe()
    if write:
        _write_plan(asked, recipe, folder, run, gpu_memory)
        return
    seen, choice = submit.job_facts(
        recipe, nodes, gpus_per_node or asked.gpus, site, ranks=ranks, options=sbatch or (), gpu_memory=gpu_memory
    )
    asked.say()
    decided = prepare.decide(recipe, seen, choice, RunPaths(folder / new_id(recipe.name)))
    if as_json:
        print(decided.model_dump_json(indent=1))
        refuse_or_warn(decided)
        return
    show_plan(decided, verbose=verbose)
    decided.refuse()


def show_plan(decided: Plan, *, verbose: bool) -> None:
    """Print the plan of a login node in ten lines, or all of it."""
    from dray.runs.submit import ASSUMED

    print(f"{ASSUMED}\n")
    print(render.text(decided) if verbose else f"{render.summary(decided)}\n{_MORE}\n", end="")


def _write_plan(asked: Chosen, recipe: Recipe, runs: Path, run: str | None, gpu_memory: float | None) -> None:
    """Answer slurm/plan.sh in lines `key=value`: all facts that it must correct, or what it needs of the plan."""
    from dray.planning import missing_facts

    seen = facts.parse(sys.stdin.buffer.read().decode(errors="replace"), where="standard input")
    seen = seen.model_copy(update={**store.within(Path(seen.image)), "gpu_memory_gb": gpu_memory})
    seen, choice = prepare.at_site(seen)
    missing = [*missing_facts.ask(recipe, choice.site, seen), *prepare.ask_for_layer(recipe, choice.site, seen)]
    if missing:
        print("\n".join(missing))
        return
    asked.say()
    decided, paths = prepare.write(recipe, seen, runs=runs, run=run, choice=choice, beside=asked.beside)
    refuse_or_warn(decided)
    print(f"attempt={paths.folder}\ncheckpoints={recipe.checkpoint.folder}")
    print(f"stage={decided.stage}\nspares={','.join(decided.world.spares)}")
    print(f"choices={' '.join(decided.recipe.choices)}")


def run(
    context: typer.Context,
    arguments: Arguments = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    engine: Engine = "bare",
    site: Site = "",
    runs: Runs = None,
    hostfile: Path | None = None,
    node: int | None = None,
    run_id: RunName = "",
    secret: Path | None = None,
    here: Here = False,
) -> int:
    """Run a recipe or a command on this machine, or on the machines of a hostfile, and show its progress.

    Inside an salloc it runs on the nodes of the allocation, without waiting in the queue.

    --hostfile FILE: File of machines, one a line; type the same command on each. Needs no SSH.
    --node N: With --hostfile: this machine's line in it, from 0.
    --secret FILE: With --hostfile: file with the secret that all machines share.

    dray run recipes/smoke-cpu.toml train.steps=20
    dray run --ranks 2 -- python train.py --lr 1e-4
    """
    from dray.runs import local

    folder = (runs or default_runs()).absolute()
    run = run_named(folder, run_id)
    asked = chosen(arguments, context, ranks, gpus_per_node, run)
    asked.say()
    names_engine = typed(context, "engine")
    starter: str = engine
    if asked.last and not names_engine and asked.last.plan.engine in engines.names("local"):
        starter = asked.last.plan.engine
    recipe = asked.recipe()
    allocated = None if hostfile else Allocation.of(os.environ)
    if allocated and not here and not names_engine:
        if gpus_per_node:
            raise ConfigError(
                "--gpus-per-node is set by salloc; --ranks sets the number of ranks", fix="leave out --gpus-per-node"
            )
        allocated.require_nodes(nodes)
        print(f"in the allocation of this shell, without a queue: {allocated} (--local: on this machine alone)")
        argv = allocated.argv(
            run=str(run or ""),
            site=site,
            recipe=[*([str(asked.path.absolute())] if asked.path else []), *asked.overrides],
            command=asked.command,
        )
        process.replace(argv, allocation_environment(os.environ, folder))  # the batch script then gets Ctrl-C
    if not hostfile and starter not in engines.names("local"):
        raise ConfigError(f"--engine {starter} needs --hostfile, or a job", fix="dray submit")
    if hostfile and nodes is not None:
        raise ConfigError("the lines of a hostfile are the nodes", found=f"--nodes {nodes}", fix="leave out --nodes")
    if engines.get(starter).image == "python":
        local.require(recipe)
    if hostfile or recipe.image != "cpu":
        gpus_per_node = gpus_per_node or ranks or asked.gpus
    name, only, proof = run.name if run else "", None, ""
    if hostfile:
        machines = local.read_hostfile(hostfile)
        name = name or recipe.name
        only, proof = machines.here(node), machines.secret(secret)
        facts = machines.facts(recipe, run=name, engine=starter, gpus_per_node=gpus_per_node, site=site)
    else:
        facts = local.facts(recipe, engine=starter, nodes=nodes, gpus_per_node=gpus_per_node, site=site)
    runs = run.parent if run else folder
    plan, paths = prepare.write(recipe, facts, runs=runs, run=name, secret=proof, beside=asked.beside)
    options = sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
    again = [*program(), *options, *([] if run else [f"--run={plan.run}"])]
    again += ["--", *asked.command] if asked.command else []
    return conduct(plan, paths, again=shlex.join(again), only=only)


def conduct(plan: Plan, paths: RunPaths, *, again: str = "", only: int | None = None) -> int:
    """Start a plan on this machine, and show its progress and its end; the exit code.

    `again` is the command for its next attempt.
    """
    from dray.runs import local
    from dray.runs.finish import finish
    from dray.runs.status import Stop, utc

    progress = Progress(plan, paths, only)
    refuse_or_warn(plan)
    began = time.monotonic()
    stopped = None
    with progress:
        try:
            code = local.run(plan, paths, watch=progress.update, stopping=progress.stopping, only=only)
        except KeyboardInterrupt as stop:  # all started processes have ended by now
            code = 128 + signal.Signals[str(stop) or "SIGINT"]
            stopped = Stop(str(stop) or "Ctrl-C", utc())
    spent = metrics.cost_here(paths, plan, time.monotonic() - began) if only is None else None
    result = finish(paths, code=code, stopped=stopped, spent=spent)
    print(summary(result, paths, again, progress.rank))
    return result.exit_code


class Progress:
    """Shows the progress of one run. On a hostfile's other machines (`only`), which have no metrics, it shows what
    their first rank prints."""

    def __init__(self, plan: Plan, paths: RunPaths, only: int | None = None) -> None:
        from dray.cli.runs import Steps
        from dray.runs.active_run.logs import Output

        world, rank = plan.world, (only or 0) * plan.world.ranks_per_node
        where = f"{counted(world.size, 'rank')} on {counted(len(world.nodes), 'node')} ({plan.engine})"
        self.rank: int | None = None  # whose output is shown
        self._view: Output | Steps = Steps(paths.metrics)
        if rank or not plan.recipe.train:
            self.rank, self._view = rank, Output(paths.rank_log(rank))
            if world.size > 1:
                where += f"; rank {rank} is shown here, the logs of all are in {paths.folder.name}/{paths.logs.name}"
        print(f"run folder: {paths.run}\n{plan.recipe.name}: {where}", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._view.close()

    def update(self) -> None:
        """Show what has come since the last look."""
        self._view.look()

    def stopping(self) -> None:
        """Print that the run is being stopped."""
        self._view.close()
        print("stopping: ranks get a few seconds to end by themselves; Ctrl-C again ends them at once", flush=True)


def submit(
    context: typer.Context,
    arguments: Arguments = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    gpu_memory: GpuMemory = None,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    run: RunName = "",
    dry_run: bool = False,
    as_json: Json = False,
    follow: bool = False,
    on: On = "",
    first: str = "",
) -> None:
    """Check the recipe, make the run folder and call sbatch with the site's options.

    --dry-run: Print the command and the plan; submit nothing.
    --follow: After submitting, watch the run as dray top does.
    --first REMOTE,REMOTE: Submit at these remotes, and keep the job that starts first.

    dray submit recipes/smoke-cpu.toml --nodes 4 --dry-run batch.global_size=32
    dray submit recipes/mine.toml -N4 --gpus-per-node 4 --sbatch=--time=08:00:00
    """
    from dray.runs import replay as replays
    from dray.runs import submit as queue

    queue.check(sbatch or [])
    if (on and first) or (follow and (on or first)) or (as_json and dry_run):
        raise ConfigError(
            "two options exclude each other", wanted="one of --on, --first and --follow; one of --json and --dry-run",
            fix="leave out one; after submitting with --on: dray logs --on NAME -f",
        )  # fmt: skip
    if remotes := list(dict.fromkeys(first.split(","))) if first else [on] if on else []:
        from dray.cli.remote import submit_at

        asked = chosen(arguments, context, ranks, gpus_per_node)
        options = {
            "nodes": nodes, "gpus-per-node": gpus_per_node or None, "gpu-memory": gpu_memory,
            "runs": runs if typed(context, "runs") else None,
        }  # fmt: skip
        argv = [f"--{name}={value}" for name, value in options.items() if value is not None]
        argv += [f"--sbatch={option}" for option in sbatch or []]
        argv += ["--dry-run"] * dry_run + ["--json"] * as_json
        site = site if typed(context, "site") else ""
        raise typer.Exit(submit_at(remotes, asked, argv, run=run, site=site))
    runs = (runs or default_runs()).absolute()
    folder = run_named(runs, run)
    asked = chosen(arguments, context, ranks, gpus_per_node, folder)
    recipe = asked.recipe()
    before = replays.job_options(folder) if folder and asked.last else None
    asked.say(before.options if before else ())
    if before:
        site, gpu_memory = site or before.site, before.gpu_memory if gpu_memory is None else gpu_memory
    if asked.image:
        os.environ.setdefault("DRAY_IMAGE", asked.image)
    folder = folder or runs / new_id(recipe.name)
    attempt = next_attempt(folder)
    submission = queue.Submission(
        [*([str(asked.path.absolute())] if asked.path else []), *asked.overrides], asked.command, nodes, ranks or 0,
        gpus_per_node or asked.gpus, site, gpu_memory, sbatch or (), before.options if before else None,
    )  # fmt: skip
    job = queue.planned(recipe, attempt, submission)  # before the image, which may take long to build
    plan = job.plan
    if dry_run:
        print(f"{shlex.join(job.argv)}\n")
        show_plan(plan, verbose=False)
        image = store.job_file(dray_home.root(), plan.recipe.image_name, plan.engine)
        if how := store.absent(image, plan.recipe.image_name, plan.engine):
            print(f"dray: note: {image} does not exist; before you submit: {how}", file=sys.stderr)
        return
    store.required(dray_home.root(), plan.recipe.image_name, recipe.image_digest, plan.engine)
    queue.require_free(folder, sbatch or [])
    refuse_or_warn(plan)
    code = Path(recipe.command.folder) if recipe.command else asked.beside
    number = queue.submit(job.argv, folder, recipe.runs.share, code)
    if as_json:
        print(json.dumps({"job": number, "run": str(folder), "attempt": attempt.attempt}))
    else:
        which = f", for attempt {attempt.attempt}" if attempt.attempt > 1 else ""
        print(f"job {number} is in the queue{which}\nrun folder: {folder}")
    if follow:
        from dray.cli.runs import watch_live

        watch_live(folder)
