"""Whose signature an image must have, as the recipe and the site demand."""

from __future__ import annotations

from collections.abc import Iterator

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.engines.base import Engine


def signers(recipe: Recipe, site: Site) -> tuple[str, ...]:
    """The keys of which one must have signed; if recipe and site both name keys, those in both lists."""
    demanded = [keys for keys in (recipe.image_signers, site.image_signers) if keys]
    return tuple(key for key in demanded[0] if all(key in keys for keys in demanded)) if demanded else ()


def refusals(recipe: Recipe, site: Site, engine: Engine) -> Iterator[Finding]:
    """Refuse a demand that no node could check."""
    if not recipe.image_signers and not site.image_signers:
        return
    if not engine.verifies:
        yield Finding(
            f"{engine.name} cannot check who signed an image",
            wanted="apptainer or singularity, since image_signers is set",
            found=f"engine {engine.name}",
            fix="leave image_signers out of the recipe or the site file, or start a SIF",
            code=exit_codes.CONFIG,
        )
    elif not signers(recipe, site):
        yield Finding(
            "the recipe and the site have no key in common in image_signers",
            where=f"site {site.name}",
            wanted=f"one of the site's image_signers: {', '.join(site.image_signers)}",
            found=f"the recipe's: {', '.join(recipe.image_signers)}",
            fix="add a key of the site to the recipe's image_signers",
            code=exit_codes.CONFIG,
        )
