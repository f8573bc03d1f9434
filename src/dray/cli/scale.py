"""`dray scale`: one recipe on several numbers of GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli import studies
from dray.cli.args import Json, Overrides, Runs, Sbatch, Site, found
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.fitness import host
from dray.planning.world import divide
from dray.runs import prepare
from dray.runs.arrays import Size


def scale(
    recipe: studies.RecipeFile = None,
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option(metavar="1,2,4", help="Numbers of GPUs, one run for each.")] = "",
    ranks: Annotated[str, typer.Option(metavar="1,2", help="On CPUs: numbers of ranks, one run for each.")] = "",
    per_node: Annotated[
        int, typer.Option(min=0, help="GPUs or ranks per full node. 0: the site's GPUs, or all on one node.")
    ] = 0,
    weak: Annotated[
        bool, typer.Option("--weak", help="Weak scaling: hold the batch of each rank, not the global batch.")
    ] = False,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    at_most: studies.AtOnce = None,
    table: studies.Table = "",
    as_json: Json = False,
) -> None:
    """Run a recipe on several numbers of GPUs, and compare speed, efficiency and losses; exit code 1 if losses differ.

    With Slurm, dray submits the runs: those with the same nodes and options as one job array. --table shows them later.
    Without Slurm, or inside a job, the runs follow one another here.

    dray scale recipes/smoke-cpu.toml --ranks 1,2 train.steps=20
    dray scale recipes/gpt2-wikitext-ddp.toml --gpus 1,2,4,8,16 --weak
    dray scale --table 20261120-124439-scale-smoke-cpu-cea81f
    """
    studies.show_asked(table, runs, as_json=as_json)
    if recipe is None or bool(gpus) == bool(ranks):
        raise ConfigError(
            "there is nothing to compare", wanted="a recipe, and either --gpus or --ranks with several numbers",
            fix="dray scale RECIPE --gpus 1,2,4,8; on CPUs --ranks 1,2",
        )  # fmt: skip
    path, settings = found(recipe), overrides or []
    counts = _numbers("--gpus" if gpus else "--ranks", gpus or ranks)
    read = prepare.read_recipe(path, settings)
    per_node = per_node or (host.site(site).site.gpus_per_node if gpus else 0) or max(counts)
    wanted = []
    for count in counts:
        nodes, each = _nodes(count, per_node)
        own = [f"batch.global_size={_weak_batch(read, count, counts[0])}"] if weak else []
        _batch(read, count, own)
        wanted.append(studies.Wanted(own, Size(nodes, gpus=each) if gpus else Size(nodes, ranks=each), count))
    start = studies.Start(
        kind="weak" if weak else "strong", recipe=path, settings=settings, site=site, runs=runs, sbatch=sbatch or [],
        at_most=at_most,
    )  # fmt: skip
    start(wanted)


def _numbers(option: str, text: str) -> list[int]:
    try:
        counts = sorted({int(one) for one in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise ConfigError(f"{option} has a wrong value", wanted="whole numbers, such as 1,2,4", found=text)
    return counts


def _nodes(count: int, per_node: int) -> tuple[int, int]:
    """Nodes, and the ranks of each: a node is full before there is a second."""
    if count <= per_node:
        return 1, count
    if count % per_node:
        raise ConfigError(
            f"{count} ranks do not fill whole nodes of {per_node}", wanted=f"a multiple of {per_node}",
            fix="choose other numbers, or set --per-node",
        )  # fmt: skip
    return count // per_node, per_node


def _weak_batch(recipe: Recipe, count: int, fewest: int) -> int:
    """The global batch for `count` ranks; the recipe's own is for the fewest."""
    if not recipe.batch:
        raise ConfigError("--weak needs a recipe with [batch]", fix="leave out --weak")
    return recipe.batch.global_size * count // fewest


def _batch(recipe: Recipe, count: int, own: list[str]) -> None:
    """Refuse a batch that is not divisible, before the first run begins."""
    if recipe.batch:
        size = int(own[0].partition("=")[2]) if own else recipe.batch.global_size
        divide(recipe.batch.model_copy(update={"global_size": size}), world_size=count)
