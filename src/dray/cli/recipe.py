"""`dray recipe`: look at recipes without running them."""

from __future__ import annotations

import typer

from dray.batch import divide
from dray.cli.options import Overrides, RecipeFile
from dray.runs.write import read_recipe
from dray.spec.recipe import Recipe
from dray.spec.schema import Schema

app = typer.Typer(no_args_is_help=True, help="Check recipes, and see what they may say.")


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print all that is wrong with a recipe's keys, values and batch. Model and text are looked at when it runs."""
    good = read_recipe(recipe, overrides or [])
    if good.batch and good.ranks_per_node:
        divide(good.batch, world_size=good.nodes * good.ranks_per_node)
    print(f"{recipe}: good ({good.name}, {good.launcher} in the {good.image} image)")


@app.command()
def keys() -> None:
    """Print every key of a recipe: its type, its default and what it is for."""
    for key, kind, default, doc in Schema(Recipe).describe():
        print(f"{key}  ({kind}; {default or 'may be left out'})\n    {' '.join(doc.split())}")
