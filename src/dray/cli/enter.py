"""`dray enter`: a shell, a command or JupyterLab in the container of a run."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dray import process
from dray.cli.args import Run, Runs
from dray.contract.findings import ConfigError
from dray.runs import prepare
from dray.runs.active_run import enter as inside
from dray.runs.status import status
from dray.runs.store import find, require_own


def enter(
    context: typer.Context,
    run: Run = "",
    node: str = "",
    jupyter: bool = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --jupyter: its port on the node.")] = 8888,
    runs: Runs = None,
) -> None:
    """Open a shell, or run a COMMAND, in the container of a run that is still running.

    The shell has the run's mounts and environment. The run continues when you leave.

    --node N: A node's name, or its number from 0. Default: the first node.
    --jupyter: Start JupyterLab there, and print how to reach it.

    dray enter 4711 --node 1
    dray enter 4711 -- nvidia-smi
    dray enter 4711 --jupyter
    """
    command = list(context.obj or [])
    state = status(require_own(find(run, runs)))
    plan, paths = inside.active_plan(state)
    host = inside.node_of(plan, node)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not terminal and not command:
        what = "JupyterLab, whose token only you may see," if jupyter else "a shell"
        raise ConfigError(f"{what} needs a terminal", fix="dray enter RUN -- COMMAND")
    layer = None
    if jupyter:
        command = inside.jupyter(plan, paths.folder / f"jupyter-{port}", port)
        layer = prepare.made_layer(plan.variant, inside.JUPYTER)
        print(f"on your own machine: {inside.tunnel(host if state.slurm_job else '', port)}")
        print("then open the last URL that JupyterLab prints here; Ctrl-C ends it")
        if not layer and not plan.layer:
            print(f"if JupyterLab is missing: {inside.install(plan)}")
    elif not command:
        command = ["bash"]
        print(
            f"in the image of {plan.run} on {host} ({plan.engine}); exit leaves it, and the run goes on",
            file=sys.stderr,
        )
    argv = inside.argv(state, host, command, terminal=terminal, layer=layer)
    process.replace(argv, inside.environment(os.environ))
