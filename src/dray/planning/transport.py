"""The network between the nodes: whose libraries the run uses for it, and whether the preflight proves it."""

from __future__ import annotations

from dray.config.image import ACCELERATORS
from dray.config.recipe import Preflight, Recipe
from dray.config.site import Fabric, Site
from dray.engines.base import Engine
from dray.facts import Facts
from dray.planning.choice import Choice

_NOTHING: dict[str, object] = {"strategy": "none", "libraries": (), "plugin": ""}


def fabric(recipe: Recipe, site: Site, facts: Facts, engine: Engine) -> Choice[Fabric]:
    """The site's fabric, if the engine can add the host's libraries; else the image must have all that it needs."""
    why = " ".join(site.why.get("fabric", f"site {site.name}").split())
    if facts.nodes == 1 and site.fabric.strategy != "none":
        return Choice(site.fabric.model_copy(update=_NOTHING), "one node has no network between nodes")
    brought = engine.slingshot.get(recipe.image)
    if facts.nodes > 1 and site.fabric.kind == "slingshot" and brought:
        return Choice(site.fabric.model_copy(update=_NOTHING), brought)
    if site.fabric.strategy == "host" and not engine.host_libraries:
        return Choice(site.fabric.model_copy(update=_NOTHING), why)
    # gloo has no plugins, and an adopted image has one of its own, under a name of its own, or none.
    if site.fabric.plugin == "image" and (ACCELERATORS[recipe.image] == "cpu" or facts.adopted):
        return Choice(site.fabric.model_copy(update={"plugin": ""}), why)
    return Choice(site.fabric, why)


def hooks(recipe: Recipe, site: Site, facts: Facts, engine: Engine) -> dict[str, str]:
    """The annotations for the engine's hooks; a run of one node needs none for the fabric."""
    return engine.annotations(recipe.image, site.fabric.kind if facts.nodes > 1 else "", site.annotations)


def preflight(recipe: Recipe, facts: Facts) -> Choice[Preflight | None]:
    """The preflight's settings, None if there is none: nodes on one machine have no network to prove."""
    several = facts.nodes > 1 and facts.scheduler != "local"
    if {"always": True, "never": False, "several": several}[recipe.preflight.when]:
        return Choice(recipe.preflight, f"all ranks, within {recipe.preflight.timeout_s} s after the rendezvous")
    return Choice(None, f"none (preflight.when = {recipe.preflight.when})")
