"""`dray run`: run a recipe or a command on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import typer

from dray import engines, process
from dray.cli.args import (
    Arguments,
    Engine,
    GpusPerNode,
    Here,
    Nodes,
    Ranks,
    RunName,
    Runs,
    Site,
    chosen,
    program,
    refuse_or_warn,
    typed,
)  # fmt: skip
from dray.cli.progress import Progress
from dray.contract.findings import ConfigError
from dray.planning.schema import Plan
from dray.runs import local, metrics, prepare
from dray.runs.finish import finish
from dray.runs.result import summary
from dray.runs.slurm import Allocation, allocation_environment
from dray.runs.status import Stop, utc
from dray.runs.store import RunPaths, default_runs, run_named


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
