"""Losses that jump: what counts as one, and how steps and samples are named."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import pytest

from dray.train.loop import divergence
from dray.train.loop.divergence import Watch

FEED = SimpleNamespace(by_source=lambda numbers: {"data.train": [*numbers]})
BATCH = SimpleNamespace(per_device=2, gradient_accumulation_steps=2)


def jumps(losses: list[float]) -> list[int]:
    watch = Watch()
    return [number for number, loss in enumerate(losses) if watch.jumped(loss) is not None]


def learned(count: int, noise: float) -> list[float]:
    """A loss as it falls, with noise."""
    chance = random.Random(1)
    return [2 + 8 * math.exp(-step / 40) + chance.gauss(0, noise) for step in range(count)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_what_falls_with_noise_does_not_jump(noise: float) -> None:
    assert jumps(learned(1000, noise)) == []


@pytest.mark.parametrize("at", [8, 50, 900])
def test_a_spike_is_one_however_long_it_lasts(at: int) -> None:
    losses = learned(1000, 0.02)
    losses[at : at + 3] = [losses[at] * 3] * 3
    assert jumps(losses) == [at]


def test_two_spikes_are_two() -> None:
    losses = learned(1000, 0.02)
    losses[300], losses[320] = 30.0, 30.0
    assert jumps(losses) == [300, 320]


def test_a_loss_that_rises_for_good_is_the_new_one() -> None:
    assert jumps([2.0] * 40 + [3.0] * 100) == [40]


def test_the_first_lines_tell_nothing_yet() -> None:
    assert jumps([2.0] * 7 + [50.0]) == []


@pytest.mark.parametrize(
    ("steps", "ranks", "wanted"),
    [
        (range(1), [0, 1], "samples 0 to 7 of data.train"),
        (range(5, 6), [1], "samples 42 to 43, 46 to 47 of data.train"),
        (range(5, 7), [0, 1], "samples 40 to 55 of data.train"),
        (range(10), [0], "samples 0 to 1, 4 to 5, 8 to 9, 12 to 13, 16 to 17, 20 to 21 and more of data.train"),
    ],
)
def test_samples_of_steps_and_ranks(steps: range, ranks: list[int], wanted: str) -> None:
    assert divergence.text(divergence.samples(FEED, BATCH, steps, ranks, 2)) == wanted


def test_steps_that_are_left_out() -> None:
    watch = Watch()
    watch.skipped = [[3, 3], [7, 9]]
    assert [step for step in range(12) if watch.leaves_out(step)] == [3, 7, 8, 9]
    assert [watch.left_out(step) for step in (2, 3, 8, 20)] == [0, 1, 3, 4]
    watch.skipped = [[3, 5], [4, 6]]
    assert watch.left_out(9) == 4


@pytest.mark.parametrize("at", [20, 45])
def test_one_that_resumes_finds_the_same(at: int) -> None:
    losses = learned(60, 0.02)
    losses[50] = 20.0
    first, then = Watch(), Watch()
    for loss in losses[:at]:
        first.jumped(loss)
    state = json.loads(json.dumps(first.state()))
    assert divergence.is_state(state)
    then.load(state)
    assert [then.jumped(loss) for loss in losses[at:]] == [first.jumped(loss) for loss in losses[at:]]
    then.load({})
    assert then.state() == {"skipped": [], "losses": []}


@pytest.mark.parametrize(
    ("skipped", "good"),
    [
        ([], True), ([[1, 1]], True), ([[1, 2], [3, 9], [4, 4]], True), ([[1, 1]] * 4, False), ([[0, 1]], False),
        ([[2, 1]], False), ([[1, True]], False), ([[1]], False), ([1], False), ({}, False), (None, False),
        ([[1, 1 << 70]], False), ("12", False),
    ],
)  # fmt: skip
def test_what_a_manifest_may_say_of_them(skipped: object, good: bool) -> None:
    assert divergence.is_state({"skipped": skipped, "losses": [1.5]}) is good


@pytest.mark.parametrize(
    "found", [None, [], {"losses": []}, {"skipped": [], "losses": ["x"]}, {"skipped": [], "losses": [math.inf]}]
)
def test_what_is_no_state(found: object) -> None:
    assert not divergence.is_state(found)
