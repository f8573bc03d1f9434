"""The network between the nodes: whose libraries the run uses for it, and whether the preflight proves it."""

from __future__ import annotations

from dray.config.recipe import Preflight, Recipe
from dray.config.site import Fabric, Site
from dray.engines.base import Engine
from dray.facts import Facts
from dray.planning.schema import Choice

_NOTHING: dict[str, object] = {"strategy": "none", "libraries": (), "plugin": ""}


def fabric(recipe: Recipe, site: Site, facts: Facts, engine: Engine) -> Choice[Fabric]:
    """The site's fabric, if the engine can add the host's libraries; else the image must have all that it needs."""
    fabric, brought = site.fabric, engine.slingshot.get(recipe.image)
    changes: dict[str, object] = {}
    why = " ".join(site.why.get("fabric", f"site {site.name}").split())
    if facts.nodes == 1 and fabric.strategy != "none":
        changes, why = _NOTHING, "one node has no network between nodes"
    elif facts.nodes > 1 and fabric.kind == "slingshot" and brought:
        changes, why = _NOTHING, brought
    elif fabric.strategy == "host" and not engine.host_libraries:
        changes = _NOTHING
    # gloo has no plugins, and an adopted image has one of its own, under a name of its own, or none.
    elif fabric.plugin == "image" and (recipe.image == "cpu" or facts.adopted):
        changes = {"plugin": ""}
    return Choice(fabric.model_copy(update=changes), why)


def preflight(recipe: Recipe, facts: Facts) -> Choice[Preflight | None]:
    """The preflight's settings, None if there is none: nodes on one machine have no network to prove."""
    settings = recipe.preflight
    if settings.when == "always" or (settings.when == "several" and facts.nodes > 1 and facts.scheduler != "local"):
        return Choice(settings, f"all ranks, within {settings.timeout_s} s after the rendezvous")
    return Choice(None, f"none (preflight.when = {settings.when})")
