"""The image of a run: its variant, where each node reads it, who must have signed it, and the layer beside it."""

from __future__ import annotations

from pathlib import PurePosixPath

from dray.config.image_definition import ACCELERATORS
from dray.config.load_toml import validate
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract.findings import counted, listed
from dray.engines.base import Engine
from dray.facts import Facts, Layer
from dray.planning.schema import Choice


def variant(recipe: Recipe, site: Site, facts: Facts) -> Choice[str]:
    """The recipe's variant; else that of the image which the user named; else, under Slurm, the site's."""
    if "image" in recipe.model_fields_set:
        return Choice(recipe.image, "set in the recipe")
    if (facts.image_given or recipe.adopted) and facts.image_variant in ACCELERATORS:
        return Choice(facts.image_variant, "from the image that you named; the recipe sets none")
    if site.image and facts.scheduler == "slurm":
        return Choice(site.image, f"for the GPUs of site {site.name}; the recipe sets none")
    return Choice(recipe.image, "the default; the recipe sets none")


def adopted(facts: Facts) -> str | None:
    """The name of the adopted image that the run starts, None if it is not adopted; its folder is dray-NAME."""
    return PurePosixPath(facts.adopted).name.removeprefix("dray-") if facts.adopted else None


def is_adopted(recipe: Recipe, facts: Facts) -> bool:
    """Whether the image is the adopted one that the recipe names, by name or file; or neither is adopted."""
    return recipe.adopted in ((adopted(facts), facts.adopted_from) if facts.adopted else (None,))


def chosen(recipe: Recipe, site: Site, facts: Facts) -> Choice[Recipe]:
    """The recipe with its variant."""
    choice = variant(recipe, site, facts)
    if choice.value != recipe.image:
        table, settings = recipe.model_dump(exclude_unset=True), [f"image={choice.value}"]
        recipe = validate(Recipe, table, settings, what=f"the recipe with {settings[0]}")
    return Choice(recipe, f"{choice.value}: {choice.why}")


def signers(recipe: Recipe, site: Site) -> tuple[str, ...]:
    """The keys of which one must have signed; if recipe and site both name keys, those in both lists."""
    if recipe.image_signers and site.image_signers:
        return tuple(key for key in recipe.image_signers if key in site.image_signers)
    return recipe.image_signers or site.image_signers


def layer_reason(layer: Layer) -> str:
    """The layer's packages and digest, in one line."""
    names = listed(layer.packages, 3)
    return f"{counted(len(layer.packages), 'package')} after the image's own ({names}), {layer.digest[:19]}"


def copy(site: Site, facts: Facts, engine: Engine, scratch: str) -> Choice[str]:
    """The file on each node's own disk to which Slurm's sbcast copies the image; empty if nodes read the shared file.

    Only the digest proves a copy, and nobody can guess its name before it is there.
    """
    if site.stage == "off":
        return Choice("", "")
    if facts.scheduler != "slurm" or not engine.script_mounts or engine.image != "file":
        return Choice("", "not copied to the nodes: it takes Slurm's sbcast, and an engine that can start a copy")
    if not facts.image_sha256:
        return Choice("", f"not copied to the nodes: {facts.image}.json, whose digest proves a copy, is missing")
    if facts.lost:
        return Choice("", "not copied to the nodes: sbcast fails once the job has lost a node")
    file = f"{site.stage.rstrip('/')}/{PurePosixPath(scratch).name}.sif"
    return Choice(file, f"copied by sbcast to {file} of each node, else read from the shared file")
