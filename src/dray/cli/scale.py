"""`dray scale`: one recipe on several numbers of GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli import studies
from dray.cli.chosen import Overrides, found
from dray.cli.options import Json, Runs, Sbatch, Site
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.fitness import host
from dray.planning.batch import divide
from dray.runs import write
from dray.runs.arrays import Size


def scale(
    recipe: studies.RecipeFile = None,
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option(metavar="1,2,4", help="How many GPUs each run has.")] = "",
    ranks: Annotated[str, typer.Option(metavar="1,2", help="On CPUs: how many ranks each run has.")] = "",
    per_node: Annotated[
        int, typer.Option(min=0, help="GPUs, or ranks, of a whole node; else the site's GPUs, or all on one node.")
    ] = 0,
    weak: Annotated[
        bool, typer.Option("--weak", help="Hold the batch of a rank, in place of the global batch.")
    ] = False,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    at_most: studies.AtOnce = None,
    table: studies.Table = "",
    as_json: Json = False,
) -> None:
    """Run a recipe on several numbers of GPUs, and compare speed, efficiency and losses; 1 where losses differ.

    With Slurm runs with the same nodes and options are a job array, others jobs of their own, and --table shows them
    later; without, and inside a job, one follows another.

    dray scale recipes/smoke-cpu.toml --ranks 1,2 train.steps=20
    dray scale recipes/gpt2-wikitext-ddp.toml --gpus 1,2,4,8,16 --weak
    dray scale --table 20261120-124439-scale-smoke-cpu-cea81f
    """
    studies.show_asked(table, runs, as_json=as_json)
    if recipe is None or bool(gpus) == bool(ranks):
        raise ConfigError(
            "what to compare is not clear", wanted="a recipe, and --gpus or --ranks with several numbers",
            fix="dray scale RECIPE --gpus 1,2,4,8; on CPUs --ranks 1,2",
        )  # fmt: skip
    path, settings = found(recipe), overrides or []
    counts = _numbers("--gpus" if gpus else "--ranks", gpus or ranks)
    read = write.read_recipe(path, settings)
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
            f"{count} ranks do not fill nodes of {per_node}", wanted=f"a multiple of {per_node}",
            fix="other numbers, or --per-node",
        )  # fmt: skip
    return count // per_node, per_node


def _weak_batch(recipe: Recipe, count: int, fewest: int) -> int:
    """The recipe's own is for the fewest ranks."""
    if not recipe.batch:
        raise ConfigError("--weak needs a recipe with [batch]", fix="leave out --weak")
    return recipe.batch.global_size * count // fewest


def _batch(recipe: Recipe, count: int, own: list[str]) -> None:
    """Each must be divisible, before one of them begins."""
    if recipe.batch:
        size = int(own[0].partition("=")[2]) if own else recipe.batch.global_size
        divide(recipe.batch.model_copy(update={"global_size": size}), world_size=count)
