"""The facts that the planner still needs of the batch script, which reads no TOML and so guesses."""

from __future__ import annotations

from dray import engines
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.facts import Facts
from dray.planning import image


def ask(recipe: Recipe, site: Site, facts: Facts) -> str:
    """A line `key=value`, with which slurm/plan.sh plans again; empty if the planner knows all."""
    if site.engine and site.engine != facts.engine:
        return f"engine={site.engine}"
    variant = image.variant(recipe, site, facts).value
    engine = engines.get(facts.engine)
    starts_sif = engine.image == "file" and "sif" in engine.formats  # else the plan refuses an adopted image
    if starts_sif and not facts.image_given and not image.is_adopted(recipe, facts):
        return f"image={recipe.adopted or variant}"
    if facts.image_variant not in ("", variant) and not facts.image_given:
        return f"image={variant}"
    if recipe.image_digest and not facts.image_digest and engine.image == "file":
        return "image_digest="  # to be computed there
    unknown = [name for name in site.variables() if name in facts.shell and name not in facts.variables]
    unknown += [path for path in site.folders() if path not in facts.paths]
    return f"variables={' '.join(unknown)}" if unknown else ""
