"""`dray sweep`: one recipe with several values of its keys."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import studies
from dray.cli.candidates import recipes
from dray.cli.options import GpusPerNode, Json, Nodes, Overrides, Ranks, Runs, Sbatch, Site, found
from dray.contract.findings import ConfigError
from dray.runs import write
from dray.runs.paths import default_runs, new_id
from dray.runs.study import Member, Study

_MOST = 256


def sweep(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe file, or its name.", autocompletion=recipes),
    ] = None,
    overrides: Overrides = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    table: studies.Table = "",
    as_json: Json = False,
) -> None:
    """Run a recipe once for each combination of the values that settings have, divided by commas; then a table.

    With Slurm each run is a job, and --table shows them later; without, and inside a job, one follows another.

    dray sweep recipes/smoke-cpu.toml train.lr=1e-3,4e-3 train.steps=20
    dray sweep --table 20261120-124439-sweep-smoke-cpu-cea81f --json
    """
    if table:
        studies.show(studies.folder_of(table, runs), as_json=as_json)
    several = [setting for setting in overrides or [] if len(_values(setting)) > 1]
    if recipe is None or not several:
        raise ConfigError(
            "there is nothing to compare", wanted="a recipe, and a setting with several values",
            fix="dray sweep RECIPE train.lr=1e-4,3e-4,1e-3",
        )  # fmt: skip
    path = found(recipe)
    same = [setting for setting in overrides or [] if setting not in several]
    combined = [list(one) for one in itertools.product(*map(_values, several))]
    if len(combined) > _MOST:
        raise ConfigError("a sweep has too many runs", wanted=f"at most {_MOST}", found=len(combined))
    for own in combined:  # all of them, before one begins
        read = write.read_recipe(path, [*same, *own])
    folder = (runs or default_runs()).absolute() / new_id(f"sweep-{read.name}")
    given = {"--nodes": nodes, "--ranks": ranks, "--gpus-per-node": gpus_per_node, "--site": site}
    options = [f"{option}={value}" for option, value in given.items() if value]
    options += [f"--sbatch={option}" for option in sbatch or []]
    planned = [(Member(run=f"{folder.name}-{number}", settings=own), options) for number, own in enumerate(combined, 1)]
    study = Study(kind="sweep", recipe=str(path.absolute()))
    studies.start(folder, study, read, planned, [str(path.absolute()), *same])


def _values(setting: str) -> list[str]:
    """key=a,b,c as key=a, key=b and key=c; commas within brackets or quotes divide nothing."""
    key, equals, text = setting.partition("=")
    found = re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)
    return [f"{key}{equals}{value}" for value in found] or [setting]
