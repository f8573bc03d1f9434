"""`dray enter`: a shell in the container of a run."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dray import process
from dray.cli.options import Run, Runs
from dray.contract.findings import ConfigError
from dray.runs import enter as inside
from dray.runs.status import status
from dray.runs.store import find, require_own

Node = Annotated[str, typer.Option(metavar="N", help="A node's name, or its number from 0. Default: the first node.")]


def enter(context: typer.Context, run: Run = "", node: Node = "", runs: Runs = None) -> None:
    """Open a shell, or run a COMMAND, in the container of a run that is still running.

    The shell has the run's mounts and environment. The run continues when you leave.

    dray enter 4711 --node 1
    dray enter 4711 -- nvidia-smi
    """
    command = list(context.obj or [])
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    state = status(require_own(find(run, runs)))
    plan, _ = inside.plan_of(state)
    if not command and not terminal:
        raise ConfigError("a shell needs a terminal", fix="dray enter RUN -- COMMAND")
    name = inside.node_of(plan, node)
    argv = inside.argv(state, name, command or ["bash"], terminal=terminal)
    if not command:
        print(
            f"in the image of {plan.run} on {name} ({plan.engine}); exit leaves it, and the run goes on",
            file=sys.stderr,
        )
    process.replace(argv, inside.environment(os.environ) | inside.variables(plan))
