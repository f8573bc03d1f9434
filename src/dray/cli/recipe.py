"""`dray recipe`: look at recipes without running them."""

from __future__ import annotations

import typer

from dray.cli.options import Overrides, RecipeFile
from dray.runs.write import read_recipe

app = typer.Typer(no_args_is_help=True, help="Check recipes.")


@app.callback()
def _group() -> None:
    """Keeps `check` a verb of its own: with one command only, typer would drop its name."""


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print everything that is wrong with a recipe, or that nothing is."""
    good = read_recipe(recipe, overrides or [])
    print(f"{recipe}: good ({good.name}, {good.launcher} in the {good.image} image)")
