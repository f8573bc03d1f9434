"""Losses that jump: what counts as one."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train.loop.metrics import Jumps

pytestmark = pytest.mark.torch


def jumps(losses: list[float]) -> list[int]:
    before = Jumps()
    return [number for number, loss in enumerate(losses) if before.median_before(loss) is not None]


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
