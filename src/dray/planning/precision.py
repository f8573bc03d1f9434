"""Chooses the type of the matrix products, if the recipe sets none."""

from __future__ import annotations

from collections.abc import Iterator

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.planning.choice import Choice


def chosen(recipe: Recipe, site: Site) -> Choice[Recipe]:
    """The recipe with train.precision decided, and why it differs from the default."""
    train, on_cpu = recipe.train, ACCELERATORS[recipe.image] == "cpu"
    if train is None or "precision" in train.model_fields_set or (on_cpu and train.master_weights):
        return Choice(recipe, "")
    if not on_cpu and not _emulated(recipe, site):
        return Choice(recipe, "")
    better = train.model_copy(update={"precision": "fp32" if on_cpu else "fp16"})
    emulates = "many CPUs emulate" if on_cpu else f"the GPUs of site {site.name} emulate"
    return Choice(recipe.model_copy(update={"train": better}), f" (the recipe sets none, and {emulates} bf16)")


def refusals(recipe: Recipe, site: Site) -> Iterator[Finding]:
    """Refuse bf16 on GPUs that emulate it: a run would be slow without a warning."""
    if recipe.train and recipe.train.precision == "bf16" and _emulated(recipe, site):
        yield Finding(
            "the GPUs of this site emulate bf16, without tensor cores",
            where=f"site {site.name}: {site.about}",
            wanted="train.precision = fp16 or fp32",
            found="train.precision = bf16",
            fix="train.precision=fp16",
            code=exit_codes.CONFIG,
        )


def _emulated(recipe: Recipe, site: Site) -> bool:
    return not site.bf16 and ACCELERATORS[recipe.image] != "cpu"
