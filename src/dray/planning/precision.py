"""The type of the matrix products, where a recipe leaves it to the GPUs that a site has."""

from __future__ import annotations

from collections.abc import Iterator

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.planning.choice import Choice


def chosen(recipe: Recipe, site: Site) -> Choice[Recipe]:
    """The recipe with its precision, and why it is another than the default."""
    train = recipe.train
    if train is None or "precision" in train.model_fields_set or not _emulated(recipe, site):
        return Choice(recipe, "")
    half = train.model_copy(update={"precision": "fp16"})
    why = f" (the recipe names none, and the GPUs of site {site.name} emulate bf16)"
    return Choice(recipe.model_copy(update={"train": half}), why)


def refusals(recipe: Recipe, site: Site) -> Iterator[Finding]:
    """Refuse bf16 where it is emulated: nothing says so while it runs."""
    if recipe.train and recipe.train.precision == "bf16" and _emulated(recipe, site):
        yield Finding(
            "the GPUs of this site emulate bf16, without tensor cores",
            where=f"site {site.name}: {site.about}",
            wanted="train.precision=fp16, or fp32",
            found="train.precision = bf16",
            fix="train.precision=fp16",
            code=exit_codes.CONFIG,
        )


def _emulated(recipe: Recipe, site: Site) -> bool:
    return not site.bf16 and ACCELERATORS[recipe.image] != "cpu"
