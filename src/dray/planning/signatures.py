"""Whose signature an image must have: what the recipe and the site demand, each for itself."""

from __future__ import annotations

from collections.abc import Iterator

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import Finding
from dray.engines.base import Engine


def signers(recipe: Recipe, site: Site) -> tuple[str, ...]:
    """The keys of which one must have signed; where both demand one, those that both name."""
    demanded = [keys for keys in (recipe.image_signers, site.image_signers) if keys]
    return tuple(key for key in demanded[0] if all(key in keys for keys in demanded)) if demanded else ()


def refusals(recipe: Recipe, site: Site, engine: Engine) -> Iterator[Finding]:
    """What no node could check."""
    if not recipe.image_signers and not site.image_signers:
        return
    if not engine.verifies:
        yield Finding(
            f"{engine.name} does not check who signed an image",
            wanted="apptainer or singularity, since image_signers is set",
            found=f"engine {engine.name}",
            fix="leave image_signers out of the recipe or the site file, or start a SIF",
            code=exit_codes.CONFIG,
        )
    elif not signers(recipe, site):
        yield Finding(
            "no key may sign the image for both the recipe and the site",
            where=f"site {site.name}",
            wanted=f"one of the site's image_signers: {', '.join(site.image_signers)}",
            found=f"the recipe's: {', '.join(recipe.image_signers)}",
            fix="name a key in the recipe's image_signers that the site has too",
            code=exit_codes.CONFIG,
        )
