"""fsdp on several nodes: over how many of them it shards; with fewer, less is gathered between nodes."""

from __future__ import annotations

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import sharding
from dray.facts import Facts, Files
from dray.planning.estimates import memory, model_shape
from dray.planning.world import World

_GB = 10**9


def reason(recipe: Recipe, world: World, site: Site, facts: Facts, files: Files) -> str:
    """Over how many nodes fsdp shards, and why; empty if there is nothing to choose."""
    nodes, train = len(world.nodes), recipe.train
    if train is None or train.strategy != "fsdp" or nodes == 1:
        return ""
    if train.fsdp_shard != "auto":
        (asked,) = sharding.nodes_of(train.fsdp_shard, nodes)
        return f"{_over(world, asked)}: train.fsdp_shard"
    limit = memory.limit(site, facts)
    model = model_shape.known(files)
    if not limit or model is None:
        return f"over the fewest nodes whose ranks hold it in {_quarter()}, measured at the start; copies on the others"
    # As the trainer counts it, in its leanest way.
    held = (4 if recipe.model.dtype != "bf16" else 2) * (model.parameters + 3 * model_shape.trained(model))
    sizes = sharding.nodes_of("auto", nodes)
    least = next((one for one in sizes if held / (one * world.ranks_per_node) <= sharding.SHARE * limit * _GB), nodes)
    return (
        f"{_over(world, least)}: the fewest nodes where {_quarter()} ({limit:g} GB) holds its share of the "
        f"{held / _GB:.0f} GB; the trainer measures the memory itself"
    )


def _over(world: World, nodes: int) -> str:
    each, of = world.ranks_per_node, len(world.nodes)
    copies = f", {of // nodes} copies of the model" if nodes < of else ""
    return f"over {sharding.text(nodes * each, nodes, of)}{copies}"


def _quarter() -> str:
    return f"{sharding.SHARE:.0%} of each rank's memory"
