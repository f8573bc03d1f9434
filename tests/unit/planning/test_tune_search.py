"""What `dray study tune` may change, and the search among it, with planted figures."""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning import tune_search, world
from dray.planning.schema import Plan
from dray.planning.tune_search import (
    CHECKPOINTING,
    COMPILE,
    KEYS,
    LOSS,
    ROWS,
    SHARD,
    STRATEGY,
    Candidate,
    Figure,
    Space,
)
from dray.runs import prepare
from dray.runs.store import RunPaths
from helpers import ROOT

RECIPE = ROOT / "recipes" / "smoke-cpu.toml"


def planned(*settings: str, nodes: int = 1, **facts: Any) -> Plan:
    seen = Facts(
        scheduler="local", nodelist="node1" if nodes == 1 else f"node[1-{nodes}]", nodes=nodes, engine="bare",
        image=sys.executable, **facts,
    )  # fmt: skip
    recipe = prepare.read_recipe(RECIPE, settings)
    return prepare.decide(recipe, *prepare.at_site(seen), RunPaths(Path("/runs/001")))


def candidate(**values: Any) -> Candidate:
    """By the last parts of the keys."""
    named = {key.rpartition(".")[2]: key for key in KEYS}
    return Candidate(tuple((key, values[name]) for name, key in named.items() if name in values))


def axis(key: str, *values: tune_search.Value) -> dict[str, list[tune_search.Changes]]:
    return {key: [{key: value} for value in values]}


class TestSpace:
    def test_all_keys_of_a_run_of_one_node(self) -> None:
        found = tune_search.space(planned(), {}, KEYS)
        assert found.axes == {
            **axis(ROWS, 1, 2, 4, 8),
            **axis(STRATEGY, "ddp", "fsdp", "zero1", "zero2", "zero3"),
            **axis(CHECKPOINTING, False, True),
            **axis(COMPILE, False, True),
            **axis(LOSS, "full", "chunked"),
        }
        assert found.start == candidate(
            strategy="ddp", per_device=4, activation_checkpointing=False, compile=False, loss="full"
        )
        assert len(list(found.every())) == 5 * 4 * 2 * 2 * 2
        assert next(found.every()) == found.start

    def test_several_nodes_have_shards_and_only_fsdp_has_them(self) -> None:
        found = tune_search.space(planned(nodes=2), {STRATEGY: ("fsdp",), ROWS: (4,)}, (STRATEGY, ROWS, SHARD))
        shards = [(one.get(STRATEGY), one.get(SHARD)) for one in found.every()]
        assert sorted(shards, key=str) == [("ddp", None), ("fsdp", "all"), ("fsdp", "auto"), ("fsdp", "node")]
        fsdp = found.start.changed({STRATEGY: "fsdp", SHARD: "node"})
        assert fsdp.changed({STRATEGY: "ddp"}) == found.start

    def test_one_rank_shards_nothing_and_what_is_set_stays(self) -> None:
        found = tune_search.space(planned("ranks_per_node=1"), {LOSS: ("chunked",)}, (STRATEGY, LOSS))
        assert found.axes == axis(LOSS, "full", "chunked")
        assert tune_search.space(planned("train.loss=chunked"), {}, (LOSS,)).axes == axis(LOSS, "chunked", "full")

    def test_a_deepspeed_file_decides_the_strategy(self) -> None:
        file = ROOT / "recipes" / "deepspeed"
        plan = planned(f"train.deepspeed={next(iter(sorted(file.glob('*.json'))))}")
        assert STRATEGY not in tune_search.space(plan, {}, KEYS).axes

    @pytest.mark.parametrize(
        ("words", "key"), [(["ranks_per_node=1"], STRATEGY), (["train.strategy=fsdp", "nodes=1"], SHARD)]
    )
    def test_a_key_without_a_choice_has_no_values(self, words: list[str], key: str) -> None:
        value = {STRATEGY: "fsdp", SHARD: "node"}[key]
        with pytest.raises(ConfigError, match="no choice of"):
            tune_search.space(planned(*words), {key: (value,)}, KEYS)

    def test_divisors(self) -> None:
        assert [world.divisors(number) for number in (1, 2, 12, 16)] == [
            [1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]
        ]  # fmt: skip
        assert world.divisors(10**12)[-1] == 10**12


class TestApplied:
    def test_the_global_batch_stays_and_the_accumulation_follows(self) -> None:
        recipe, start = planned("batch.gradient_accumulation_steps=2").recipe, candidate(strategy="ddp", per_device=4)
        made = tune_search.applied(recipe, start.changed({ROWS: 1, COMPILE: True}), start, ranks=2)
        assert made.batch
        assert made.train
        assert (made.batch.global_size, made.batch.per_device, made.batch.gradient_accumulation_steps) == (16, 1, 8)
        before = recipe.model_dump(exclude={"batch": True, "train": {"compile", "strategy"}})
        assert made.model_dump(exclude={"batch": True, "train": {"compile", "strategy"}}) == before

    def test_offload_is_the_own_strategys(self) -> None:
        recipe = planned("train.strategy=zero2", "train.offload=optimizer").recipe
        start = candidate(strategy="zero2", per_device=4)
        offloads = []
        for strategy in ("zero2", "ddp"):
            made = tune_search.applied(recipe, start.changed({STRATEGY: strategy}), start, ranks=2).train
            assert made
            offloads.append(made.offload)
        assert offloads == ["optimizer", ""]

    def test_keys_that_do_not_go_together(self) -> None:
        recipe = planned("lora.rank=4", "model.dtype=bf16").recipe
        start = candidate(strategy="ddp", per_device=4)
        with pytest.raises(ConfigError, match="fsdp"):
            tune_search.applied(recipe, start.changed({STRATEGY: "fsdp"}), start, ranks=2)


def test_values() -> None:
    assert tune_search.values("ddp,fsdp") == ("ddp", "fsdp")
    assert tune_search.values("1, 16") == (1, 16)
    assert tune_search.values("true,false") == (True, False)


@pytest.mark.parametrize(
    ("key", "text"),
    [(STRATEGY, "ddp,fdsp"), (ROWS, "1,x"), (ROWS, "0,1"), (ROWS, "1,"), (ROWS, "1,²"), (COMPILE, "yes,no"),
     (LOSS, "auto,full"), (ROWS, "1," + "9" * 5000), (ROWS, "2,3")],
)  # fmt: skip
def test_values_that_are_none(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} cannot have this value"):
        tune_search.space(planned(), {key: tune_search.values(text)}, KEYS)


@pytest.mark.parametrize(
    ("settings", "configuration", "largest"),
    [
        ([], {"model_type": "llama"}, 1e-4),
        ([], {"model_type": "gpt2"}, 0.05),
        ([], {"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0.0, "attn_pdrop": 0}, 1e-4),
        ([], {"model_type": "other", "hidden_dropout": 0.1}, 0.05),
        (["train.precision=bf16"], {"model_type": "llama"}, 0.02),
        (["image=cuda"], {"model_type": "llama"}, 2e-3),
        (["image=cuda", "train.tf32=false"], {"model_type": "llama"}, 1e-4),
        (["lora.dropout=0.1"], {"model_type": "llama"}, 0.05),
    ],
)
def test_how_far_losses_may_be_apart(settings: list[str], configuration: dict[str, Any], largest: float) -> None:
    assert tune_search.tolerance(prepare.read_recipe(RECIPE, settings), configuration, exact=1e-4)[0] == largest


GRID = Space(
    candidate(strategy="ddp", per_device=4, activation_checkpointing=False, compile=False, loss="full"),
    {
        **axis(ROWS, 1, 2, 4, 8, 16, 32),
        **axis(STRATEGY, "ddp", "fsdp", "zero1", "zero2", "zero3"),
        **axis(CHECKPOINTING, False, True),
        **axis(COMPILE, False, True),
        **axis(LOSS, "full", "chunked"),
    },
)


def room(one: Candidate) -> float:
    """Gigabytes, as a model of them grows."""
    rows = one.get(ROWS)
    assert isinstance(rows, int)
    each = (0.4 if one.get(CHECKPOINTING) else 2.0) + (0.1 if one.get(LOSS) == "chunked" else 0.8)
    return {"ddp": 16.0, "zero1": 10.0, "zero2": 8.0, "zero3": 5.0, "fsdp": 5.0}[str(one.get(STRATEGY))] + rows * each


def speed(one: Candidate, factors: dict[tuple[str, Any], float]) -> float:
    """Larger micro-batches are faster, with less and less to win."""
    rows = one.get(ROWS)
    assert isinstance(rows, int)
    return math.prod([1000 * rows / (rows + 3), *(factors.get(pair, 1.0) for pair in one.values)])


FACTORS: dict[tuple[str, Any], float] = {
    (STRATEGY, "fsdp"): 0.93, (STRATEGY, "zero3"): 0.8, (STRATEGY, "zero1"): 0.97, (STRATEGY, "zero2"): 0.9,
    (CHECKPOINTING, True): 0.78, (COMPILE, True): 1.3, (LOSS, "chunked"): 0.95,
}  # fmt: skip


class Planted:
    """Answers as runs would."""

    def __init__(self, memory: float, noise: float = 0.0, factors: dict[tuple[str, Any], float] = FACTORS) -> None:
        self.memory, self.noise, self.factors = memory, noise, factors
        self.known: dict[Candidate, Figure | None] = {}

    def __call__(self, one: Candidate) -> Figure | None:
        if one not in self.known:
            found = speed(one, self.factors) * (1 + self.noise * random.Random(repr(one)).uniform(-1, 1))
            fits = room(one) <= self.memory
            self.known[one] = Figure(found, found * self.noise, room(one)) if fits else None
        return self.known[one]

    def runs(self) -> int:
        """What does not fit is not started."""
        return sum(figure is not None for figure in self.known.values())

    def best(self) -> Candidate:
        ran = [(one, figure) for one, figure in self.known.items() if figure]
        found = tune_search.best(ran, GRID.start)
        assert found
        return found


def searched(memory: float, **planted: Any) -> tuple[Planted, Planted]:
    """By the search, and by the grid."""
    by_search, by_grid = Planted(memory, **planted), Planted(memory, **planted)
    tune_search.descend(GRID, by_search)
    for one in GRID.every():
        by_grid(one)
    return by_search, by_grid


class TestSearch:
    @pytest.mark.parametrize("memory", [7.0, 10.0, 16.0, 20.0, 24.0, 32.0, 40.0, 64.0, 80.0, 1000.0])
    def test_it_finds_what_the_whole_grid_finds_in_few_runs(self, memory: float) -> None:
        by_search, by_grid = searched(memory)
        fastest = by_grid(by_grid.best())
        found = by_search(by_search.best())
        assert fastest
        assert found
        assert found.speed >= 0.99 * fastest.speed, (by_search.best(), by_grid.best())
        assert len(by_grid.known) == 240
        assert by_search.runs() <= max(25, by_grid.runs() / 2)

    @pytest.mark.parametrize("seed", range(8))
    def test_whatever_the_factors_are_where_all_fits(self, seed: int) -> None:
        chance = random.Random(seed)
        options = [option for key in GRID.axes for option in GRID.axes[key] if key != ROWS]
        factors = {pair: chance.uniform(0.5, 1.5) for option in options for pair in option.items()}
        by_search, by_grid = searched(1000.0, factors=factors)
        assert by_search.best() == by_grid.best()

    def test_with_noise_it_is_among_the_best(self) -> None:
        by_search, by_grid = searched(40.0, noise=0.02)
        found, fastest = by_search(by_search.best()), by_grid(by_grid.best())
        assert found
        assert fastest
        assert not tune_search.beats(fastest, found)

    def test_the_own_setting_stays_where_nothing_is_faster_by_more_than_noise(self) -> None:
        by_search = Planted(1000.0, factors={(COMPILE, True): 1.03, (CHECKPOINTING, True): 0.9})
        flat = Space(GRID.start, {key: GRID.axes[key] for key in (CHECKPOINTING, COMPILE)})
        by_search.noise = 0.05
        tune_search.descend(flat, by_search)
        assert by_search.best() == GRID.start
        assert len(by_search.known) == 3

    def test_a_micro_batch_without_room_is_tried_with_what_makes_room(self) -> None:
        """Alone, activation checkpointing costs a fifth; with it, the micro-batch may be four times as large."""
        factors = {**FACTORS, (CHECKPOINTING, True): 0.95, (COMPILE, True): 0.5, (LOSS, "chunked"): 0.99}
        start = GRID.start.changed({ROWS: 4})
        by_search = Planted(room(start), factors=factors)
        own = Space(start, {key: options for key, options in GRID.axes.items() if key != STRATEGY})
        tune_search.descend(own, by_search)
        assert by_search.best() == start.changed({ROWS: 16, CHECKPOINTING: True, LOSS: "chunked"})
        assert by_search(GRID.start.changed({CHECKPOINTING: True})).speed < by_search(start).speed  # type: ignore[union-attr]

    def test_it_begins_with_what_is_nearest_if_the_own_setting_does_not_run(self) -> None:
        by_search = Planted(15.0)
        tune_search.descend(GRID, by_search)
        assert by_search(GRID.start) is None
        assert by_search(by_search.best())

    def test_nothing_runs(self) -> None:
        by_search = Planted(1.0)
        tune_search.descend(GRID, by_search)
        assert not any(by_search.known.values())
        assert tune_search.best([], GRID.start) is None


def test_of_equals_the_fewest_changes_then_the_least_memory() -> None:
    other, third = GRID.start.changed({COMPILE: True}), GRID.start.changed({LOSS: "chunked"})
    two = other.changed({LOSS: "chunked"})
    figures = {two: Figure(104, 3), other: Figure(101, 3, 5.0), third: Figure(100, 3, 4.0)}
    for order in itertools.permutations(figures.items()):
        assert tune_search.best(order, GRID.start) == third
    assert tune_search.best([(GRID.start, Figure(90, 1)), (two, Figure(104, 3))], GRID.start) == two
