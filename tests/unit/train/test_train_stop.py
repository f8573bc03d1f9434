"""A training that is asked to end: all ranks save after the same step, and go on as if nothing had been."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from helpers import runs  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch
BEGUN = Callable[..., Run]
DDP = ("train.strategy=ddp",)
FSDP = ("train.strategy=fsdp", "checkpoint.every=[[0, 1]]")
# After the step HELD, and one before it that is logged, a rank waits until it is asked: so no run ends before that.
HOLD = """
import time
from dray.train.runtime.stop import Stop
after, calls = Stop.after, []
def held(self, step):
    calls.append(step)
    while step == HELD and len(calls) > 2 and not self._asked:
        time.sleep(0.01)
    return after(self, step)
Stop.after = held
"""


@pytest.fixture(scope="module")
def run(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> BEGUN:
    folder, count = tmp_path_factory.mktemp("my runs"), iter(range(1000))
    return lambda ranks, *words, **other: Run(forks, folder / f"run-{next(count)}", ranks, *words, **other)


def until(happened: Callable[[], Any], other: Run) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, other.said()
        time.sleep(0.01)


def steps(other: Run) -> int:
    return len(other.events("step")) if other.paths.metrics.exists() else 0


@pytest.mark.parametrize(
    ("words", "number", "last"),
    [
        pytest.param(DDP, signal.SIGUSR1, 6, id="ddp-SIGUSR1"),
        pytest.param(DDP, signal.SIGTERM, 15, id="ddp-SIGTERM", marks=pytest.mark.slow),
        pytest.param(FSDP, signal.SIGUSR1, 15, id="fsdp-SIGUSR1", marks=pytest.mark.slow),
        pytest.param(FSDP, signal.SIGTERM, 15, id="fsdp-SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_to_the_same_losses(run: BEGUN, words: tuple[str, ...], number: signal.Signals, last: int) -> None:
    plain = run(2, *words, f"train.steps={last}").end()
    held = HOLD.replace("HELD", str(last // 2))
    other, moments = run(2, *words, f"train.steps={last}", before=held), random.Random(3)
    reached, ends = 0, []
    while reached < last:
        with other.going() as pids:
            until(lambda before=reached: steps(other) > before, other)
            for pid in moments.sample(pids, 2):
                os.kill(pid, number)
                time.sleep(moments.random() / 20)  # as when a node hears it later than another
        asked = 75 in other.codes and set(other.codes) <= {75, -9}  # the first that ends ends the others, as a launcher
        assert asked or set(other.codes) == {0}, other.said()
        assert [event["step"] for event in other.events("step")] == list(range(1, steps(other) + 1))
        reached = last if not asked else steps(other)
        if asked:
            ends.append(reached)
            announced = re.findall(rf"the run was asked to end, after step (\d+) of {last}\b", other.said())
            assert {*map(int, announced)} == {*ends}  # once in each start
            assert f"the newest checkpoint is of step {reached}" in other.said()
            assert other.events("checkpoint")[-1]["checkpoint"] == reached
            assert all(event["seconds"] > 0 for event in other.events("checkpoint"))
    assert ends
    assert other.losses() == plain.losses()


def test_before_the_first_step_nothing_is_saved(run: BEGUN) -> None:
    other = run(2, "train.steps=100000")
    with other.going() as pids:
        until(lambda: other.log(0).exists() and other.log(0).stat().st_size, other)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
    first = set(other.codes) - {-signal.SIGKILL}  # the first that ends ends the others, as a launcher
    assert first, other.said()
    assert first <= {75, -signal.SIGUSR1}, other.said()
    assert not [*other.paths.checkpoints.glob("step-*")]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_is_gone_keeps_nobody(run: BEGUN, lost: int) -> None:
    """SIGTERM also ends what is left of a run that has failed, which waits for nobody. Rank 0 serves the store here."""
    other = run(3, "train.steps=100000", "batch.global_size=6", "batch.per_device=2")
    with other.going() as pids:
        until(lambda: steps(other) > 1, other)
        os.kill(pids[lost], signal.SIGSTOP)
        others = [pid for pid in pids if pid != pids[lost]]
        for pid in others:
            os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        while any(map(runs, others)):
            assert time.monotonic() - began < 15, other.said()
            time.sleep(0.01)
        with suppress(ProcessLookupError):  # as a launcher does, what started them has ended it
            os.kill(pids[lost], signal.SIGKILL)
    assert other.codes[lost] == -9
    assert 143 in other.codes, other.said()  # with the first that ends, what started them kills the others
