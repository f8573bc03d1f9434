"""Arguments that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, such as recipes/smoke-cpu.toml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the recipe's.")
]
Nodes = Annotated[int | None, typer.Option("--nodes", "-N", min=1, help="Nodes, in place of the recipe's.")]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs on a node, a rank for each.")]
Site = Annotated[str, typer.Option(envvar="DRAY_SITE", help="A site under slurm/sites, or a site file.")]
Runs = Annotated[Path | None, typer.Option("--runs", envvar="DRAY_RUNS", help="Where run folders go; else ./runs.")]
