"""Chooses the type of the matrix products, if the recipe sets none."""

from __future__ import annotations

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.planning.choice import Choice


def chosen(recipe: Recipe, site: Site) -> Choice[Recipe]:
    """The recipe with train.precision decided, and why it differs from the default."""
    train, on_cpu = recipe.train, ACCELERATORS[recipe.image] == "cpu"
    if train is None or "precision" in train.model_fields_set or (on_cpu and train.master_weights):
        return Choice(recipe, "")
    if not on_cpu and not emulated(recipe, site):
        return Choice(recipe, "")
    better = train.model_copy(update={"precision": "fp32" if on_cpu else "fp16"})
    emulates = "many CPUs emulate" if on_cpu else f"the GPUs of site {site.name} emulate"
    return Choice(recipe.model_copy(update={"train": better}), f" (the recipe sets none, and {emulates} bf16)")


def emulated(recipe: Recipe, site: Site) -> bool:
    """Whether the GPUs of the run emulate bf16."""
    return not site.bf16 and ACCELERATORS[recipe.image] != "cpu"
