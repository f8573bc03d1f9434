"""`dray recipe`: look at recipes without running them."""

from __future__ import annotations

import typer

from dray.cli.options import Overrides, RecipeFile
from dray.config import checkout
from dray.config.model import Spec, load
from dray.config.recipe import Recipe
from dray.config.schema import Schema
from dray.planning.batch import divide
from dray.runs.write import read_recipe

app = typer.Typer(no_args_is_help=True, help="Check recipes, and list their keys.")


@app.command("list")
def list_() -> None:
    """Print the recipes that come with dray. `scale=tiny` after a verb walks one with a small model and text."""
    for path in sorted((checkout.root() / "recipes").glob("*.toml")):
        print(f"{path.stem:<28} {load(Recipe, path).about}")


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print all that is wrong with a recipe's keys, values and batch. Model and datasets are checked when it runs."""
    settings = overrides or []
    good = read_recipe(recipe, settings)
    for one in (good, read_recipe(recipe, [*settings, "scale=tiny"])) if good.tiny else (good,):
        if one.batch and one.ranks_per_node:
            divide(one.batch, world_size=one.nodes * one.ranks_per_node)
    print(f"{recipe}: good ({good.name}, {good.launcher} in the {good.image} image)")


@app.command()
def keys() -> None:
    """Print every key of a recipe: its type, its default and what it is for."""
    show_keys(Recipe)


def show_keys(model: type[Spec]) -> None:
    """For writing such a file."""
    for key, kind, default, doc in Schema(model).describe():
        print(f"{key}  ({kind}; {default or 'may be left out'})\n    {' '.join(doc.split())}")
