"""`dray run`: run a recipe or a command on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dray import engines, process
from dray.cli import candidates
from dray.cli.chosen import Arguments, Chosen, Engine, Launcher, chosen, report
from dray.cli.options import GpusPerNode, Nodes, Ranks, Runs, Site, again
from dray.cli.progress import Progress
from dray.contract.findings import ConfigError
from dray.planning.schema import Plan
from dray.runs import cost, hosts, local, write
from dray.runs.finish import finish
from dray.runs.result import Result, summary
from dray.runs.slurm import Allocation, allocation_environment
from dray.runs.stop import Stop, utc
from dray.runs.store import RunPaths, default_runs, run_name, run_named


def run(
    context: typer.Context,
    arguments: Arguments = None,
    launcher: Launcher = "",
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    engine: Engine = "bare",
    site: Site = "",
    runs: Runs = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of machines, one a line; type the same command on each. Needs no SSH."),
    ] = None,
    node: Annotated[int | None, typer.Option(help="With --hostfile: this machine's line in it, from 0.")] = None,
    run_id: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="ID",
            callback=run_name,
            autocompletion=candidates.runs,
            help="Name of the run; if it exists, start its next attempt.",
        ),
    ] = "",
    secret: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --hostfile: file with the secret that all machines share."),
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="With --hostfile: print what to type on each machine.")] = False,
    here: Annotated[bool, typer.Option("--local", help="Inside an salloc: use only this machine.")] = False,
) -> None:
    """Run a recipe or a command on this machine, or on the machines of a hostfile, and show its progress.

    Inside an salloc it runs on the nodes of the allocation, without waiting in the queue.

    dray run recipes/smoke-cpu.toml train.steps=20
    dray run --ranks 2 -- python train.py --lr 1e-4
    """
    folder = (runs or default_runs()).absolute()
    asked = chosen(arguments, launcher, context, ranks, gpus_per_node, run_named(folder, run_id))
    asked.say()
    if asked.last and not _given(context, engine) and asked.last.plan.engine in engines.names("local"):
        engine = asked.last.plan.engine
    settings = asked.recipe()
    if not hostfile:
        _refuse({"--node": node is not None, "--secret": secret is not None, "--print": show}, "needs --hostfile")
    if not hostfile and (allocated := Allocation.of(os.environ)):
        if why := "--local" if here else _given(context, engine):
            print(f"on this machine only, because of {why}; without it, in the allocation: {allocated}")
        else:
            _refuse({"--gpus-per-node": bool(gpus_per_node)}, "is set by salloc; --ranks sets the number of ranks")
            allocated.require_nodes(nodes)
            _take(allocated, asked, folder, run_id, site)

    def typed(*more: str) -> str:
        return shlex.join(again(*more, command=asked.command))

    if engines.get(engine).image == "python":
        local.require(settings, typed)
    if hostfile or settings.image != "cpu":
        gpus_per_node = gpus_per_node or ranks or asked.gpus
    if not hostfile:
        _refuse(
            {f"--engine {engine}": engine not in engines.names("local")}, "needs --hostfile, or a job (dray submit)"
        )
    if hostfile:
        _refuse({"--nodes": nodes is not None}, "does not go with a hostfile, whose lines are the nodes")
        machines = hosts.read(hostfile)
        name = run_id or machines.run_id(settings)
        if show:
            named = [] if run_id else ["--run", name]
            argv = [word for word in again(*named) if word != "--print"]
            print(machines.commands(argv, asked.command), end="")
            return
        only: int | None = machines.here(node)
        proof = machines.secret(secret)
        image = local.image_of(engine, settings)
        facts = machines.facts(settings, run=name, engine=engine, image=image, gpus_per_node=gpus_per_node, site=site)
        plan, paths = write.write(settings, facts, runs=folder, run=name, secret=proof, beside=asked.beside)
    else:
        only = None
        image = local.image_of(engine, settings)
        facts = local.facts(settings, engine=engine, image=image, nodes=nodes, gpus_per_node=gpus_per_node, site=site)
        plan, paths = write.write(settings, facts, runs=folder, run=run_id or None, beside=asked.beside)
    next_attempt = typed() if run_id else typed(f"--run={plan.run}")
    raise typer.Exit(conduct(plan, paths, again=next_attempt, only=only).exit_code)


def conduct(plan: Plan, paths: RunPaths, *, again: str, only: int | None = None) -> Result:
    """Start a plan on this machine, show its progress and its end. `again` is the command for its next attempt."""
    progress = Progress(plan, paths, only)
    report(plan)
    began = time.monotonic()
    with progress:
        try:
            watch, stopping = progress.update, progress.stopping
            code, stopped = local.run(plan, paths, watch=watch, stopping=stopping, only=only), None
        except KeyboardInterrupt as stop:  # all started processes have ended by now
            code, stopped = 128 + signal.Signals[str(stop) or "SIGINT"], Stop(str(stop) or "Ctrl-C", utc())
    spent = None if only is not None else cost.here(paths, plan, time.monotonic() - began)
    result = finish(paths, code=code, stopped=stopped, spent=spent)
    print(summary(result, paths, again=again, shown=progress.rank))
    return result


def _given(context: typer.Context, engine: str) -> str:
    """The option that chose an engine of this machine; empty for the default."""
    source = context.get_parameter_source("engine")
    return f"--engine {engine}" if source and source.name != "DEFAULT" else ""


def _take(allocated: Allocation, asked: Chosen, folder: Path, run_id: str, site: str) -> NoReturn:
    """Replace this process by the batch script, which then gets Ctrl-C."""
    print(f"in the allocation of this shell, without a queue: {allocated} (--local: on this machine alone)")
    argv = allocated.argv(
        run=str(folder / run_id) if run_id else "",
        site=str(Path(site).absolute()) if site.endswith(".toml") else site,
        recipe=[*([str(asked.path.absolute())] if asked.path else []), *asked.overrides],
        command=asked.command,
    )
    process.replace(argv, allocation_environment(os.environ, folder))


def _refuse(options: dict[str, bool], why: str) -> None:
    for option, given in options.items():
        if given:
            raise ConfigError(f"{option} {why}", fix=f"leave out {option}")
