"""The facts that the planner still needs of the batch script, which reads no TOML and so guesses."""

from __future__ import annotations

from dray import engines
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.facts import Facts
from dray.planning import image


def ask(recipe: Recipe, site: Site, facts: Facts) -> list[str]:
    """All lines `key=value` with which slurm/plan.sh plans again; empty if the planner knows all."""
    engine = engines.get(site.engine or facts.engine)
    asked = [f"engine={engine.name}"] if engine.name != facts.engine else []
    variant = image.variant(recipe, site, facts).value
    starts_sif = engine.image == "file" and "sif" in engine.formats  # else the plan refuses an adopted image
    if not facts.image_given:
        if starts_sif and not image.is_adopted(recipe, facts):
            asked.append(f"image={recipe.adopted or variant}")
        elif asked or facts.image_variant not in ("", variant):
            asked.append(f"image={variant}")
    if recipe.image_digest and not facts.image_digest and engine.image == "file":
        asked.append("image_digest=")  # to be computed there
    unknown = [name for name in site.variables() if name in facts.shell and name not in facts.variables]
    unknown += [path for path in site.folders() if path not in facts.paths]
    if unknown:
        asked.append(f"variables={' '.join(unknown)}")
    return asked
