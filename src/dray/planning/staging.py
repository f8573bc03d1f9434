"""How the nodes get a copy of the image on their own disks, if the site names a folder for it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dray.config.site import Site
from dray.engines.base import Engine
from dray.facts import Facts
from dray.planning.world import World

Way = Literal["sbcast", "tree"]
_WORDS: dict[Way, str] = {"sbcast": "Slurm's sbcast", "tree": "from node to node, in a tree"}


class Staging(NamedTuple):
    """The folder on each node, empty if nothing is copied; the ways tried before each node copies the file; why."""

    folder: str = ""
    by: tuple[Way, ...] = ()
    why: str = ""


def chosen(site: Site, facts: Facts, engine: Engine, world: World, *, signed: bool) -> Staging:
    """The site's way, if the engine starts a file that nodes can copy. `signed`: the image needs a signature."""
    if not site.stage or engine.image != "file" or not engine.script_mounts:
        return Staging()
    tried: list[Way] = []
    # Only the digest proves what came another way than from the shared file. One node alone has nobody to share with.
    if facts.image_sha256 and len(world.nodes) > 1:
        # sbcast copies to all nodes of a job, also to those that take no part.
        if site.stage_by in ("auto", "sbcast") and facts.scheduler == "slurm" and not facts.spares and not facts.lost:
            tried.append("sbcast")
        # The tree's program is in the image, which would start before its signature is checked.
        if site.stage_by in ("auto", "tree") and world.shared_folder and not signed:
            tried.append("tree")
    ways = [*(_WORDS[way] for way in tried), "each node copies the shared file"]
    return Staging(site.stage, tuple(tried), f"copied to {site.stage} of each node: {', else '.join(ways)}")
