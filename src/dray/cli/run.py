"""`dray run`: a recipe on this machine."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Annotated

import typer

from dray import engines
from dray.cli import candidates
from dray.cli.options import Arguments, Engine, GpusPerNode, Launcher, Nodes, Ranks, Runs, Site, again, chosen, report
from dray.cli.progress import Progress
from dray.contract.findings import ConfigError
from dray.runs import hosts, local, write
from dray.runs.finish import finish
from dray.runs.paths import default_runs, run_name
from dray.runs.result import summary
from dray.runs.stop import Stop, utc


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
        typer.Option(metavar="FILE", help="Machines, one a line; type the same command on each. No SSH, no scheduler."),
    ] = None,
    node: Annotated[int | None, typer.Option(help="Which line of the hostfile this machine is, from 0.")] = None,
    run_id: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="ID",
            callback=run_name,
            autocompletion=candidates.runs,
            help="A name for this run; of one that is there, its next attempt.",
        ),
    ] = "",
    secret: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --hostfile: what machines prove to one another; the same on each."),
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="With --hostfile: print what to type on each machine.")] = False,
) -> None:
    """Run a recipe or a command on this machine, or on the machines of a hostfile, and show how it goes.

    dray run recipes/smoke-cpu.toml train.steps=20
    dray run --ranks 2 -- python train.py --lr 1e-4
    """
    asked = chosen(arguments, launcher, context, ranks, gpus_per_node)
    settings = asked.recipe()

    def typed(*more: str) -> str:
        return shlex.join(again(*more, command=asked.command))

    if engines.get(engine).image == "python":
        local.require(settings, typed)
    if hostfile or settings.image != "cpu":
        gpus_per_node = gpus_per_node or ranks or 0
    if not hostfile:
        _refuse({"--node": node is not None, "--secret": secret is not None, "--print": show}, "goes with --hostfile")
        one_machine = engine in engines.names("local")
        _refuse({f"--engine {engine}": not one_machine}, "goes with --hostfile, or with sbatch")
    folder = (runs or default_runs()).absolute()
    if hostfile:
        _refuse({"--nodes": nodes is not None}, "is not for a hostfile, whose lines are the nodes")
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
        plan, paths = write.write(settings, facts, runs=folder, run=name, secret=proof)
    else:
        only = None
        image = local.image_of(engine, settings)
        facts = local.facts(settings, engine=engine, image=image, nodes=nodes, gpus_per_node=gpus_per_node, site=site)
        plan, paths = write.write(settings, facts, runs=folder, run=run_id or None)
    progress = Progress(plan, paths, only)
    report(plan)
    with progress:
        try:
            watch, stopping = progress.update, progress.stopping
            code, stopped = local.run(plan, paths, watch=watch, stopping=stopping, only=only), None
        except KeyboardInterrupt as stop:  # all that was started is gone by now
            code, stopped = 128 + signal.Signals[str(stop) or "SIGINT"], Stop(str(stop) or "Ctrl-C", utc())
    result = finish(paths, code=code, stopped=stopped)
    next_attempt = typed() if run_id else typed(f"--run={plan.run}")
    print(summary(result, paths, again=next_attempt, shown=progress.rank))
    raise typer.Exit(result.exit_code)


def _refuse(options: dict[str, bool], why: str) -> None:
    for option, given in options.items():
        if given:
            raise ConfigError(f"{option} {why}", fix=f"leave out {option}")
