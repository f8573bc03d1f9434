"""`dray sweep`: run one recipe with several values of its keys."""

from __future__ import annotations

import itertools
import math
import re

from dray.cli import studies
from dray.cli.args import GpusPerNode, Json, Nodes, Overrides, Ranks, Runs, Sbatch, Site, found, require_gpus
from dray.contract.findings import ConfigError
from dray.runs.arrays import Size
from dray.runs.study import MOST


def sweep(
    recipe: studies.RecipeFile = None,
    overrides: Overrides = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    at_most: studies.AtOnce = None,
    table: studies.Table = "",
    as_json: Json = False,
) -> None:
    """Run a recipe once for each combination of values, such as train.lr=1e-3,4e-3, and print a table.

    With Slurm, the runs are the tasks of a job array, and --table shows them later. Without Slurm, or inside a job, the
    runs follow one another here.

    dray sweep recipes/smoke-cpu.toml train.lr=1e-3,4e-3 train.steps=20
    dray sweep recipes/gpt2-wikitext-ddp.toml train.lr=1e-4,3e-4,1e-3 --at-most 2
    dray sweep --table 20261120-124439-sweep-smoke-cpu-cea81f --json
    """
    studies.show_asked(table, runs, as_json=as_json)
    several = [setting for setting in overrides or [] if len(_values(setting)) > 1]
    if recipe is None or not several:
        raise ConfigError(
            "there is nothing to compare", wanted="a recipe, and a setting with several values",
            fix="dray sweep RECIPE train.lr=1e-4,3e-4,1e-3",
        )  # fmt: skip
    if (count := math.prod(len(_values(setting)) for setting in several)) > MOST:
        raise ConfigError("a sweep has too many runs", wanted=f"at most {MOST}", found=count)
    require_gpus(ranks, gpus_per_node)
    size = Size(nodes, ranks or 0, gpus_per_node)
    start = studies.Start(
        kind="sweep", recipe=found(recipe), settings=[one for one in overrides or [] if one not in several],
        site=site, runs=runs, sbatch=sbatch or [], at_most=at_most,
    )  # fmt: skip
    start([studies.Wanted(own, size) for own in itertools.product(*map(_values, several))])


def _values(setting: str) -> list[str]:
    """key=a,b,c as key=a, key=b and key=c; commas within brackets or quotes divide nothing."""
    key, equals, text = setting.partition("=")
    found = re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)
    return [f"{key}{equals}{value}" for value in found] or [setting]
