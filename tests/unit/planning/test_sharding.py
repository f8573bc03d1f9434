"""Over how many nodes fsdp shards: what the plan tells of it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.contract.trainer import fsdp_nodes
from dray.facts import Facts
from dray.planning import plan, world
from dray.runs.prepare import read_recipe
from helpers import ROOT


def planned(nodes: int, *words: str) -> Any:
    """On nodes of four GPUs."""
    words = ("train.strategy=fsdp", "batch.global_size=1536", "ranks_per_node=4", *words)
    recipe = read_recipe(ROOT / "recipes" / "gpt2-wikitext-ddp.toml", list(words))
    facts = Facts(
        scheduler="slurm", job=1, nodelist=f"n[1-{nodes}]", nodes=nodes, engine="apptainer", image="/i.sif",
        gpus_per_node=4,
    )  # fmt: skip
    folder = PurePosixPath("/runs/r")
    return plan.plan(recipe, Site(name="s", about="a"), facts, run_folder=folder, scratch="/tmp/s", dray="1")


@pytest.mark.parametrize(
    ("nodes", "words", "told"),
    [
        (8, (), "over the fewest nodes whose ranks hold it in 25% of each rank's memory, measured at the start; "
         "copies on the others"),
        (8, ("train.fsdp_shard=4",), "over the 16 ranks of every 4 nodes: train.fsdp_shard"),
        (8, ("train.fsdp_shard=node",), "over the ranks of each node: train.fsdp_shard"),
        (8, ("train.fsdp_shard=all",), "over all ranks: train.fsdp_shard"),
        (1, (), None),
        (8, ("train.strategy=ddp",), None),
    ],
)  # fmt: skip
def test_the_plan_tells_who_shares(nodes: int, words: tuple[str, ...], told: str | None) -> None:
    assert planned(nodes, *words).reasons.get("shards") == told


def test_groups_are_equally_large() -> None:
    (finding,) = [one for one in planned(6, "train.fsdp_shard=4").findings if "fsdp_shard" in one.problem]
    assert (finding.code, finding.problem, finding.wanted, finding.found, finding.fix) == (
        78,
        "train.fsdp_shard does not divide the number of nodes",
        "a divisor of 6 nodes: 1, 2, 3, 6",
        "train.fsdp_shard = 4",
        "train.fsdp_shard=auto",
    )
    assert not [one for one in planned(8, "train.fsdp_shard=4").findings if "fsdp_shard" in one.problem]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "nodes", "", "true", "[1]"])
def test_a_value_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match="fsdp_shard"):
        read_recipe(ROOT / "recipes" / "gpt2-wikitext-ddp.toml", [f"train.fsdp_shard={value}"])


def test_fewer_nodes_are_whole_groups() -> None:
    words = ["train.strategy=fsdp", "train.fsdp_shard=2", "batch.global_size=60", "min_nodes=1", "nodes=6"]
    recipe = read_recipe(ROOT / "recipes" / "gpt2-wikitext-ddp.toml", words)
    assert [world.fewer(recipe, 1, left) for left in (6, 5, 3, 1)] == [6, 4, 2, 0]


def test_ten_thousand_nodes_have_few_choices() -> None:
    assert len(fsdp_nodes.nodes_of("auto", 10_000)) == 25
    assert json.dumps(fsdp_nodes.nodes_of("auto", 12)) == "[1, 2, 3, 4, 6, 12]"
