"""`dray enter`: a shell, a command or JupyterLab in the container of a run."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dray import process
from dray.cli.args import Run, Runs
from dray.contract.findings import ConfigError
from dray.runs import enter as inside
from dray.runs.status import status
from dray.runs.store import find, require_own


def enter(
    context: typer.Context,
    run: Run = "",
    node: Annotated[
        str, typer.Option(metavar="N", help="A node's name, or its number from 0. Default: the first node.")
    ] = "",
    jupyter: Annotated[
        bool, typer.Option("--jupyter", help="Start JupyterLab there, and print how to reach it.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="With --jupyter: the first port to try; only that machine reaches it.")
    ] = 8888,
    runs: Runs = None,
) -> None:
    """Open a shell, or run a COMMAND, in the container of a run that is still running.

    The shell has the run's mounts and environment. The run continues when you leave.

    dray enter 4711 --node 1
    dray enter 4711 -- nvidia-smi
    dray enter 4711 --jupyter
    """
    command = list(context.obj or [])
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    state = status(require_own(find(run, runs)))
    if jupyter:
        try:
            inside.jupyter(state, node, port, say=_say, show_token=sys.stdout.isatty())
        except KeyboardInterrupt:
            print("JupyterLab has ended")
        return
    plan, _ = inside.active_plan(state)
    if not command and not terminal:
        raise ConfigError("a shell needs a terminal", fix="dray enter RUN -- COMMAND")
    name = inside.node_of(plan, node)
    argv = inside.argv(state, name, command or ["bash"], terminal=terminal)
    if not command:
        where = f"in the image of {plan.run} on {name} ({plan.engine})"
        print(f"{where}; exit leaves it, and the run goes on", file=sys.stderr)
    process.replace(argv, inside.environment(os.environ))


def _say(line: str) -> None:
    print(line, flush=True)
