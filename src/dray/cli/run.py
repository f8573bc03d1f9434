"""`dray run`: a recipe on this machine."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from dray.cli.options import Nodes, Overrides, RecipeFile, Runs
from dray.cli.progress import Progress
from dray.images import place
from dray.runs import local, write
from dray.runs.finish import STOPPED, finish, summary
from dray.runs.paths import RunPaths, default_runs


class Engine(enum.StrEnum):
    """What starts the nodes here."""

    bare = "bare"
    docker = "docker"


def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Nodes = None,
    engine: Annotated[Engine, typer.Option(help="bare: this Python; docker: one container a node.")] = Engine.bare,
    runs: Runs = None,
) -> None:
    """Run a recipe on this machine, each node a process or a container, and show how it goes."""
    settings = write.read_recipe(recipe, overrides or [])
    image = place.bare_python() if engine is Engine.bare else place.in_docker(settings.image)
    facts = local.facts(settings, engine=engine.value, image=image, nodes=nodes)
    plan = write.write(recipe, overrides or [], facts, runs=(runs or default_runs()).absolute())
    paths = RunPaths((runs or default_runs()).absolute() / plan.run)
    with Progress(plan, paths) as progress:
        try:
            code = local.run(plan, paths, watch=progress.update)
        except KeyboardInterrupt:  # all that was started is gone by now
            code = STOPPED
    result = finish(paths, code=code)
    print(summary(result, paths))
    raise typer.Exit(result.exit_code)
