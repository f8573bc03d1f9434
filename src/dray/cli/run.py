"""`dray run`: a recipe on this machine."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import GpusPerNode, Nodes, Overrides, RecipeFile, Runs
from dray.cli.progress import Progress
from dray.errors import ConfigError
from dray.images import place
from dray.runs import local, write
from dray.runs.finish import finish, summary
from dray.runs.paths import RunPaths, default_runs


class Engine(enum.StrEnum):
    """What starts the nodes here."""

    bare = "bare"
    docker = "docker"


def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 0,
    engine: Annotated[Engine, typer.Option(help="bare: this Python; docker: one container a node.")] = Engine.bare,
    runs: Runs = None,
) -> None:
    """Run a recipe on this machine, each node a process or a container, and show how it goes."""
    settings = write.read_recipe(recipe, overrides or [])
    if settings.image_digest:
        raise ConfigError(
            "a recipe with image_digest wants one SIF, which dray run does not start",
            found=settings.image_digest,
            fix="sbatch or dray submit; to try it here, take the line out of the recipe",
        )
    image = place.bare_python() if engine is Engine.bare else place.in_docker(settings.image)
    facts = local.facts(settings, engine=engine.value, image=image, nodes=nodes, gpus_per_node=gpus_per_node)
    plan = write.write(settings, facts, runs=(runs or default_runs()).absolute())
    paths = RunPaths(Path(plan.folder))
    with Progress(plan, paths) as progress:
        try:
            code, stopped = local.run(plan, paths, watch=progress.update), False
        except KeyboardInterrupt:  # all that was started is gone by now
            code, stopped = 130, True
    result = finish(paths, code=code, stopped=stopped)
    print(summary(result, paths))
    raise typer.Exit(result.exit_code)
