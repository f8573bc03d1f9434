"""Which variant of the image a run starts, where its recipe names none."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from dray.config.image import ACCELERATORS
from dray.config.model import validate
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.facts import Facts
from dray.planning.choice import Choice


def variant(recipe: Recipe, site: Site, facts: Facts) -> Choice[str]:
    """The recipe's; else that of the image which the user named; else, where Slurm starts the run, the site's."""
    if "image" in recipe.model_fields_set:
        return Choice(recipe.image, "the recipe says so")
    if (facts.image_given or recipe.adopted) and facts.image_variant in ACCELERATORS:
        return Choice(facts.image_variant, "of the image that you named, since the recipe names none")
    if site.image and facts.scheduler == "slurm":
        return Choice(site.image, f"for the GPUs of site {site.name}, since the recipe names none")
    return Choice(recipe.image, "the default, since the recipe names none")


def adopted(facts: Facts) -> str | None:
    """The name of the adopted image that the run starts, if it is one: dray-NAME is its folder."""
    return PurePosixPath(facts.adopted).name.removeprefix("dray-") if facts.adopted else None


def is_adopted(recipe: Recipe, facts: Facts) -> bool:
    """Whether the image is the one that the recipe has adopted, by its name or its file; or neither is adopted."""
    return recipe.adopted in ((adopted(facts), facts.adopted_from) if facts.adopted else (None,))


def adopt_line(adopted: str) -> str:
    """The command that adopts what a recipe names."""
    return f"dray image adopt {shlex.quote(adopted)}" if "/" in adopted else f"dray image adopt SOURCE --name {adopted}"


def chosen(recipe: Recipe, site: Site, facts: Facts) -> Choice[Recipe]:
    """The recipe with its variant."""
    found = variant(recipe, site, facts)
    if found.value == recipe.image:
        return Choice(recipe, f"{found.value}: {found.why}")
    table = recipe.model_dump(exclude_unset=True)
    whole = validate(Recipe, table, [f"image={found.value}"], what=f"the recipe with image={found.value}")
    return Choice(whole, f"{found.value}: {found.why}")
