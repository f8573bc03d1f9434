"""`dray env`: check the environment variables of a run's ranks."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from dray.cli.chosen import Arguments, Launcher, chosen
from dray.cli.options import GpusPerNode, Nodes, Ranks, Site
from dray.config import dray_home
from dray.contract import exit_codes
from dray.contract.findings import counted
from dray.fitness import variables
from dray.images import inputs
from dray.runs import login, write
from dray.runs.store import RunPaths

_LEVELS = ("error", "warning", "note")

app = typer.Typer(no_args_is_help=True, help="Check the environment variables that ranks will get.")


@app.callback()
def _group() -> None:
    """Keep `check` a subcommand: without a callback Typer drops the name of an only command."""


@app.command()
def check(
    context: typer.Context,
    arguments: Arguments = None,
    launcher: Launcher = "",
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    site: Site = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Print which variables of a run slow it down, make it hang or have no effect; exit code 78 if one is wrong.

    dray env check recipes/smoke-cpu.toml --site lumi -N4 image=rocm
    """
    root = dray_home.root()
    given = arguments or ([] if context.obj else [str(root / "recipes" / "smoke-cpu.toml")])
    settings = chosen(given, launcher, context, ranks, gpus_per_node).recipe()
    facts, choice = login.facts(settings, nodes, gpus_per_node, site, ranks=ranks, options=(), gpu_memory=None)
    plan = write.decide(settings, facts, choice, RunPaths(root / "runs" / "run"))
    found = variables.check(plan, os.environ, inputs.environment_of(root, inputs.image(root, plan.recipe.image)))
    if as_json:
        print(json.dumps([finding.data() for finding in found], indent=1))
    else:
        for finding in found:
            print(finding.line())
        counts = ", ".join(counted(sum(one.level == level for one in found), level) for level in _LEVELS)
        print(f"{plan.reasons['site']}; {counted(len(plan.env), 'variable')} inside: {counts}")
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(exit_codes.CONFIG)
