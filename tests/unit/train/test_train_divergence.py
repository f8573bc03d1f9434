"""Whole trainings whose loss jumps or is not finite: the step and the ranks are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.runs.finish import finish  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch
BEGUN = Callable[..., Run]
# What samples do to the loss, at the steps that a test names; the trainer is as it is.
STAND_IN = """
import os
from dray.train.loop.loop import Loop
from dray.train.parallel.ddp import Ddp
step_, losses, now = Loop._step, Ddp.losses, 0

def stepped(self, step, *rest):
    global now
    now = step + 1
    return step_(self, step, *rest)

def lost(self, batch):
    loss, more = losses(self, batch)
    if os.environ.get("RANK") in os.environ.get("RANKS", "01"):
        if now == int(os.environ.get("NAN_AT", 0)):
            loss = loss * float("nan")
        if now == int(os.environ.get("JUMP_AT", 0)):
            loss = loss * 30
    return loss, more

Loop._step, Ddp.losses = stepped, lost
"""
FOUR = ("checkpoint.every=4", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def run(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> BEGUN:
    folder, count = tmp_path_factory.mktemp("my runs"), iter(range(99))
    return lambda ranks, *words: Run(forks, folder / f"run-{next(count)}", ranks, *words, before=STAND_IN)


@pytest.fixture(scope="module")
def alone(run: BEGUN) -> Run:
    return run(2).end()


@pytest.mark.parametrize("log_every", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_loss_that_is_not_finite_is_named_with_its_rank(run: BEGUN, log_every: int) -> None:
    other = run(2, *FOUR, f"train.log_every={log_every}").end(1, NAN_AT="6", RANKS="1")
    assert (
        "the loss is not finite any more\n  wanted: finite numbers\n"
        "  found:  NaN or Inf at step 6, on rank 1; the newest checkpoint is of step 4\n"
    ) in other.said()
    (event,) = other.events("divergence")
    assert (event["kind"], event["first_step"], event["last_step"]) == ("not finite", 6, 6)
    found = finish(other.paths, code=1)
    assert found.warnings == ["the loss is not finite any more: NaN or Inf at step 6, on rank 1"]


@pytest.mark.slow
def test_a_loss_that_jumps_is_a_warning(run: BEGUN, alone: Run) -> None:
    other = run(2, *FOUR).end(JUMP_AT="15")
    (event,) = other.events("divergence")
    assert (event["kind"], event["first_step"], event["last_step"]) == ("jump", 15, 15)
    assert other.losses()[:14] == alone.losses()[:14]
    (warning,) = finish(other.paths, code=0).warnings
    assert warning.startswith("the loss jumped at step 15: ")
    assert warning.endswith(" is the median of the lines before")
