"""Decides whether the model's layers are compiled."""

from __future__ import annotations

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.planning.choice import Choice


def chosen(recipe: Recipe) -> Choice[Recipe]:
    """The recipe with train.compile decided, and why."""
    if recipe.train is None:
        return Choice(recipe, "")
    if recipe.train.compile != "auto":
        return Choice(recipe, f"{_shown(recipe.train.compile)}: set in the recipe")
    choice, why = _auto(recipe)
    train = recipe.train.model_copy(update={"compile": choice})
    return Choice(recipe.model_copy(update={"train": train}), f"{_shown(choice)}: {why}")


def _auto(recipe: Recipe) -> tuple[bool, str]:
    assert recipe.train is not None
    if ACCELERATORS[recipe.image] == "cpu":
        return False, "on a CPU it takes longer than it saves"
    if recipe.train.strategy == "zero3":
        return False, "zero3 gathers the weights inside each layer"
    if recipe.analog and recipe.analog.enabled:
        return False, "analog layers are simulated step by step"
    return True, "each layer by itself, as the steps on GPUs are faster"


def _shown(choice: bool) -> str:
    return str(choice).lower()
