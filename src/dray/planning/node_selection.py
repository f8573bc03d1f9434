"""Chooses the nodes that take part: all but the spare ones; fewer once nodes have failed and no spare is left."""

from __future__ import annotations

from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError, UnfitError, counted
from dray.facts import Facts
from dray.planning import world


def chosen(recipe: Recipe, facts: Facts) -> Facts:
    """The facts with the nodes that take part, in the job's order."""
    spares = recipe.spares
    if facts.scheduler != "slurm" or facts.login or not spares + len(facts.lost):
        return facts
    hosts = facts.hosts()
    left = [host for host in hosts if host not in facts.lost]
    whole = len(hosts) - spares
    if whole < 1:
        raise ConfigError(
            "all nodes of the job would be spare nodes",
            wanted=f"more than {counted(spares, 'node')}, since spares = {spares} take no part at first",
            found=counted(len(hosts), "node"),
            fix=f"sbatch --nodes={spares + 1} or more, or spares=0",
        )
    count = min(whole, len(left))
    if count < whole:
        count = fewer(recipe, world.ranks_per_node(recipe, facts).value, len(left))
    if not count:
        raise UnfitError(
            "no spare node is left",
            wanted=counted(whole, "node"),
            found=f"{' '.join(left) or 'none'}; {' '.join(facts.lost)} failed before",
            fix="submit again, with more spares, or with min_nodes (docs/survive.md)",
        )
    return facts.model_copy(
        update={
            "nodelist": ",".join(left[:count]),
            "nodes": count,
            "spares": tuple(left[count:]),
            "missing": whole - count,
        }
    )


def fewer(recipe: Recipe, ranks_per_node: int, left: int) -> int:
    """The most of the `left` nodes among whose ranks the global batch can be divided, in whole groups of
    train.fsdp_shard; 0 if they are too few."""
    group = recipe.train.fsdp_shard if recipe.train else "auto"
    for count in range(left, max(recipe.min_nodes, 1) - 1, -1) if recipe.min_nodes else ():
        if isinstance(group, int) and count % group:
            continue
        if not recipe.batch or recipe.batch.global_size % (count * ranks_per_node) == 0:
            return count
    return 0
