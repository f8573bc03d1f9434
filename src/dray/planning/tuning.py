"""What `dray tune` may change of a recipe: how it computes, and never what it trains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from dray.config.model import explained
from dray.config.recipe import Recipe
from dray.config.training import STRATEGIES
from dray.contract.findings import ConfigError
from dray.planning.schema import Plan

Value = str | int | bool
STRATEGY, ROWS, CHECKPOINTING = "train.strategy", "batch.per_device", "train.activation_checkpointing"
COMPILE, LOSS, SHARD = "train.compile", "train.loss", "train.fsdp_shard"
KEYS = (ROWS, STRATEGY, CHECKPOINTING, COMPILE, LOSS, SHARD)
"""In the order of the search: the fastest strategy depends more on the micro-batch than the reverse."""
SAVERS: tuple[Mapping[str, Value], ...] = (
    {CHECKPOINTING: True},
    {LOSS: "chunked"},
    {CHECKPOINTING: True, LOSS: "chunked"},
)
"""Changes that make room for a larger micro-batch."""


class Axis(NamedTuple):
    """A key and its values: numbers in ascending order, others with the recipe's own first."""

    key: str
    values: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Whether the values have an order, so that the search can follow one direction."""
        return self.key == ROWS


class Candidate(NamedTuple):
    """A value for each key."""

    values: tuple[tuple[str, Value], ...]

    def get(self, key: str) -> Value | None:
        """The key's value; None if the key has no effect with the others."""
        return dict(self.values).get(key)

    def changed(self, changes: Mapping[str, Value]) -> Candidate:
        """The candidate with these changes; train.fsdp_shard stays only with fsdp."""
        values = {**dict(self.values), **changes}
        if values[STRATEGY] != "fsdp":
            values.pop(SHARD, None)
        return Candidate(tuple((key, values[key]) for key in KEYS if key in values))

    def differences(self, other: Candidate) -> list[tuple[str, Value]]:
        """The keys and values in which this one differs from the other."""
        return [pair for pair in self.values if pair not in other.values]


@dataclass(frozen=True)
class Space:
    """All candidates of a recipe on so many ranks."""

    start: Candidate
    """The recipe's own setting."""
    axes: tuple[Axis, ...]
    """The keys that have several values."""

    def every(self) -> Iterator[Candidate]:
        """Each candidate of the grid once, those nearest to the recipe's own first."""
        candidates = [self.start]
        for axis in self.axes:
            candidates += [
                other
                for candidate in candidates
                for value in axis.values
                if (other := self.moved(candidate, {axis.key: value})) and other != candidate
            ]
        return iter(sorted(dict.fromkeys(candidates), key=lambda other: len(other.differences(self.start))))

    def moved(self, candidate: Candidate, changes: Mapping[str, Value]) -> Candidate | None:
        """The candidate with these values; None if a key has no effect, or no such value here."""
        allowed = {axis.key: axis.values for axis in self.axes}
        if any(value != candidate.get(key) and value not in allowed.get(key, ()) for key, value in changes.items()):
            return None
        if SHARD in changes and candidate.get(STRATEGY) != "fsdp":
            return None
        first = {SHARD: allowed[SHARD][0]} if SHARD in allowed and candidate.get(SHARD) is None else {}
        return candidate.changed({**first, **changes})


def space(plan: Plan, given: Mapping[str, Sequence[Value]], keys: Sequence[str]) -> Space:
    """The candidates of a planned recipe: the `keys` to tune, with the values `given` for some of them."""
    recipe, shares, ranks = plan.recipe, plan.batch, plan.world
    train = recipe.train
    assert train is not None
    assert shares is not None
    assert shares.per_device is not None
    start: dict[str, Value] = {
        STRATEGY: train.strategy, ROWS: shares.per_device, CHECKPOINTING: train.activation_checkpointing,
        COMPILE: train.compile, LOSS: train.loss, SHARD: train.fsdp_shard,
    }  # fmt: skip
    rows = shares.global_size // ranks.size
    sharded = len(ranks.nodes) > 1 and ranks.ranks_per_node > 1
    known: dict[str, Sequence[Value]] = {
        STRATEGY: tuple(STRATEGIES) if ranks.size > 1 and not train.deepspeed else (),
        ROWS: _divisors(rows),
        CHECKPOINTING: (False, True),
        COMPILE: (False, True),
        LOSS: ("full", "chunked"),
        SHARD: ("node", "all") if sharded else (),
    }
    if wrong := [value for value in given.get(ROWS, ()) if value not in known[ROWS]]:
        raise ConfigError(
            f"global batch {shares.global_size} is not divisible by {ranks.size} ranks x {wrong[0]} per device",
            where=ROWS, wanted=f"some of {', '.join(map(str, known[ROWS]))}", found=", ".join(map(str, given[ROWS])),
        )  # fmt: skip
    axes = []
    for key in KEYS:
        values = tuple(dict.fromkeys([start[key], *given.get(key, known[key])])) if key in keys else ()
        values = tuple(sorted(values)) if key == ROWS else values
        axes += [Axis(key, values)] if len(values) > 1 else []
    if SHARD not in {axis.key for axis in axes}:
        start.pop(SHARD)
    return Space(Candidate(tuple(start.items())).changed({}), tuple(axes))


def _divisors(number: int) -> list[int]:
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})


_CHOICES: dict[str, tuple[Value, ...]] = {
    STRATEGY: tuple(STRATEGIES), CHECKPOINTING: (False, True), COMPILE: (False, True),
    LOSS: ("full", "chunked"), SHARD: ("node", "all"),
}  # fmt: skip


def values(key: str, text: str) -> tuple[Value, ...]:
    """The values of a key to tune, which the text separates by commas."""
    chosen = []
    for word in map(str.strip, text.split(",")):
        named = {str(choice).lower(): choice for choice in _CHOICES.get(key, ())}
        value = named.get(word) if named else int(word) if re.fullmatch("[1-9][0-9]{0,8}", word) else None
        if value is None:
            wanted = f"some of {', '.join(named)}" if named else "whole numbers from 1 on"
            raise ConfigError(f"{key} cannot have this value", wanted=wanted, found=word or text)
        chosen.append(value)
    return tuple(chosen)


def keys(text: str) -> tuple[str, ...]:
    """The keys that --keys names, by their whole name or its last part."""
    chosen = []
    for word in map(str.strip, text.split(",")):
        fitting = [key for key in KEYS if word in (key, key.partition(".")[2])]
        if not fitting:
            raise ConfigError(
                "--keys names a key that dray does not tune", wanted=f"some of {', '.join(KEYS)}", found=word or text,
                fix="dray sweep RECIPE KEY=VALUE,VALUE compares other keys",
            )  # fmt: skip
        chosen += fitting
    return tuple(dict.fromkeys(chosen))


def applied(recipe: Recipe, candidate: Candidate, start: Candidate, *, ranks: int) -> Recipe:
    """The recipe with the candidate's values. ConfigError: they do not go together."""
    assert recipe.batch is not None
    table = recipe.model_dump(mode="json", exclude_unset=True)
    for key, value in candidate.values:
        part, _, name = key.partition(".")
        table[part][name] = value
    rows = candidate.get(ROWS)
    assert isinstance(rows, int)
    table["batch"]["gradient_accumulation_steps"] = recipe.batch.global_size // (ranks * rows)
    if candidate.get(STRATEGY) != start.get(STRATEGY):
        table["train"].pop("offload", None)
    try:
        return Recipe.model_validate_json(json.dumps(table))
    except ValidationError as wrong:
        text = explained(wrong).replace("Value error, ", "")
        raise ConfigError(text.partition("\n")[0], where="recipe") from wrong
