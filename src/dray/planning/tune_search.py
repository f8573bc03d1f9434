"""What `dray study tune` may change of a recipe: how it computes, never what it trains. The search for the fastest.

The search is a coordinate descent from the recipe's own setting. The micro-batch grows, or else shrinks, as long as
that is not slower. Then one key after another is changed alone, and with larger micro-batches, if it makes room. A
change stays if it is faster by more than both spreads. If none is, two changes may make room for a larger micro-batch.
A round that changes nothing is the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from operator import attrgetter
from typing import Any, NamedTuple

from dray.config.load_toml import validate
from dray.config.recipe import Recipe
from dray.config.training import STRATEGIES
from dray.contract.findings import ConfigError
from dray.planning import world
from dray.planning.estimates import model_shape
from dray.planning.schema import Plan

Value = str | int | bool
Changes = Mapping[str, Value]
STRATEGY, ROWS, CHECKPOINTING = "train.strategy", "batch.per_device", "train.activation_checkpointing"
COMPILE, LOSS, SHARD = "train.compile", "train.loss", "train.fsdp_shard"
KEYS = (ROWS, STRATEGY, CHECKPOINTING, COMPILE, LOSS, SHARD)
"""In the order of the search: the fastest strategy depends more on the micro-batch than the reverse."""
_CHOICES: dict[str, tuple[Value, ...]] = {
    STRATEGY: tuple(STRATEGIES), CHECKPOINTING: (False, True), COMPILE: (False, True),
    LOSS: ("full", "chunked"), SHARD: ("node", "all"),
}  # fmt: skip

_ALONE = "there is one rank, one node, one rank on each node, or a DeepSpeed file that decides it"


class Candidate(NamedTuple):
    """A value for each key."""

    values: tuple[tuple[str, Value], ...]

    def get(self, key: str) -> Value | None:
        """The key's value; None if the key has no effect with the others."""
        return dict(self.values).get(key)

    def changed(self, changes: Changes) -> Candidate:
        """The candidate with these changes; train.fsdp_shard stays only with fsdp."""
        values = {**dict(self.values), **changes}
        if values[STRATEGY] != "fsdp":
            values.pop(SHARD, None)
        return Candidate(tuple((key, values[key]) for key in KEYS if key in values))

    def differences(self, other: Candidate) -> list[tuple[str, Value]]:
        """The keys and values in which this one differs from the other."""
        return [pair for pair in self.values if pair not in other.values]


class Space(NamedTuple):
    """All candidates of a recipe on so many ranks."""

    start: Candidate
    """The recipe's own setting."""
    axes: Mapping[str, Sequence[Changes]]
    """The changes of each key that has several, the recipe's own among them; micro-batches in ascending order."""

    def every(self) -> Iterator[Candidate]:
        """Each candidate of the grid once, those nearest to the recipe's own first."""
        candidates = [self.start]
        for options in self.axes.values():
            candidates = [candidate.changed(option) for candidate in candidates for option in options]
        return iter(sorted(candidates, key=lambda candidate: len(candidate.differences(self.start))))


def space(plan: Plan, given: Mapping[str, Sequence[Value]], keys: Sequence[str]) -> Space:
    """The candidates of a planned recipe: the `keys` to tune, with the values `given` for some of them."""
    recipe, size, nodes = plan.recipe.model_copy(update={"batch": plan.batch}), plan.world.size, len(plan.world.nodes)
    start: dict[str, Any] = {key: attrgetter(key)(recipe) for key in KEYS}
    assert recipe.train is not None
    assert recipe.batch is not None
    rows = recipe.batch.global_size // size
    known: dict[str, Sequence[Value]] = {**_CHOICES, ROWS: world.divisors(rows)}
    if size == 1 or recipe.train.deepspeed:
        known[STRATEGY] = ()
    if nodes in (1, size):
        known[SHARD] = ()
    for key, options in given.items():
        if wrong := [value for value in options if value not in known[key]]:
            raise ConfigError(
                f"{key} cannot have this value",
                wanted=f"some of {', '.join(map(str, known[key]))}" if known[key] else f"no choice of {key}: {_ALONE}",
                found=wrong[0],
            )
    chosen = {key: [start[key]] for key in KEYS}
    for key in keys:
        chosen[key] = list(dict.fromkeys([start[key], *given.get(key, known[key])]))
    chosen[ROWS].sort()
    shards = chosen.pop(SHARD)
    axes = {key: [{key: value} for value in options] for key, options in chosen.items()}
    if len(shards) == 1:
        del start[SHARD]
    elif "fsdp" in chosen[STRATEGY]:
        axes[STRATEGY].remove({STRATEGY: "fsdp"})
        axes[STRATEGY] += [{STRATEGY: "fsdp", SHARD: shard} for shard in shards]
    tuned = {key: options for key, options in axes.items() if len(options) > 1}
    return Space(Candidate(tuple(start.items())).changed({}), tuned)


def values(text: str) -> tuple[Value, ...]:
    """The values of a key to tune, which the text separates by commas."""
    bools = {"true": True, "false": False}
    texts = [word.strip() for word in text.split(",")]
    return tuple(int(word) if re.fullmatch("[0-9]{1,9}", word) else bools.get(word, word) for word in texts)


def settings(recipe: Recipe, candidate: Candidate, start: Candidate, *, ranks: int) -> list[str]:
    """The settings that make the candidate of the recipe."""
    assert recipe.batch is not None
    rows = ranks * int(candidate.get(ROWS) or 1)
    found = [f"{key}={str(value).lower()}" for key, value in candidate.values]
    found.append(f"batch.gradient_accumulation_steps={recipe.batch.global_size // rows}")
    if candidate.get(STRATEGY) != start.get(STRATEGY):
        found.append("train.offload=")
    return found


def applied(recipe: Recipe, candidate: Candidate, start: Candidate, *, ranks: int) -> Recipe:
    """The recipe with the candidate's values. ConfigError: they do not go together."""
    changes = settings(recipe, candidate, start, ranks=ranks)
    return validate(Recipe, recipe.model_dump(exclude_unset=True), changes, what="the candidate")


def tolerance(recipe: Recipe, configuration: Mapping[str, Any], *, exact: float) -> tuple[float, str]:
    """By how much the losses of one step may differ, relative to their value, and why.

    Sums of two settings have other orders, and dropouts other random numbers.
    """
    model = model_shape.completed(configuration)
    train, lora = recipe.train, recipe.lora
    assert train is not None
    drops = lora is not None and lora.enabled and lora.dropout > 0
    dropout = any("drop" in key and isinstance(value, int | float) and value for key, value in model.items())
    if drops or dropout or recipe.has_analog:
        return 0.05, "dropout and noise have random numbers that depend on the micro-batch"
    if train.precision != "fp32":
        return 0.02, f"{train.precision} has few digits"
    if train.tf32 and recipe.image != "cpu":
        return 2e-3, "TF32 has 10 bits of mantissa"
    return exact, "fp32"


class Figure(NamedTuple):
    """A candidate's speed: the median of its steps in tokens a second, and within what distance half of them are."""

    speed: float
    spread: float
    memory: float = 0.0


Measure = Callable[[Candidate], Figure | None]
"""None: the candidate cannot run. The search asks for the same candidate often; measure it once."""


def beats(one: Figure, other: Figure) -> bool:
    """Whether `one` is faster than `other` by more than noise."""
    return one.speed - other.speed > one.spread + other.spread


def best(measured: Iterable[tuple[Candidate, Figure]], start: Candidate) -> Candidate | None:
    """Of the candidates that none beats: the one with the fewest changes, then the least memory, then the fastest."""
    rows = list(measured)
    if not rows:
        return None
    fastest = max(figure for _, figure in rows)
    tied = [(candidate, figure) for candidate, figure in rows if not beats(fastest, figure)]
    return min(tied, key=lambda row: (len(row[0].differences(start)), row[1].memory, -row[1].speed))[0]


def descend(space: Space, measure: Measure) -> None:
    """Measure candidates up to the fastest, from the recipe's own on, or the nearest candidate that runs."""
    sizes = list(space.axes.get(ROWS, [{ROWS: space.start.get(ROWS) or 1}]))
    options = [option for key in space.axes if key != ROWS for option in space.axes[key]]
    before: Candidate | None = None
    current = next((candidate for candidate in space.every() if measure(candidate)), None)
    while current and current != before:
        before = current
        current = _follow(current, sizes, measure)
        if current == before:
            current = _follow(current, sizes[::-1], measure)
        current = _fastest(current, options, sizes, measure)
        larger = _beyond(current, sizes)
        if current == before and larger:
            pairs = [{**first, **second, **larger[0]} for first, second in combinations(options, 2)]
            current = _fastest(current, pairs, sizes, measure)


def _fastest(current: Candidate, options: Iterable[Changes], sizes: Sequence[Changes], measure: Measure) -> Candidate:
    """The candidate with the best of these changes, each with its best micro-batch."""
    for option in options:
        other = current.changed(option)
        if measure(other):
            current = _better(_follow(other, sizes, measure), current, measure)
    return current


def _beyond(current: Candidate, sizes: Sequence[Changes]) -> Sequence[Changes]:
    return sizes[sizes.index({ROWS: current.get(ROWS) or 1}) + 1 :]


def _follow(current: Candidate, sizes: Sequence[Changes], measure: Measure) -> Candidate:
    """The candidate with the next of these micro-batches, and the next, as long as it fits and is not slower."""
    chosen = current
    for size in _beyond(current, sizes):
        other = current.changed(size)
        if _better(chosen, other, measure) == chosen:
            break
        chosen = _better(other, chosen, measure)
    return chosen


def _better(other: Candidate, current: Candidate, measure: Measure) -> Candidate:
    figure, known = measure(other), measure(current)
    return other if figure and (known is None or beats(figure, known)) else current
