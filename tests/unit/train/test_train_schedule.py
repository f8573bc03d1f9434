"""The learning rate, beside transformers' own schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from dray.config.training import Train

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from transformers import get_scheduler  # noqa: E402

from dray.train.loop.schedule import learning_rate  # noqa: E402

pytestmark = pytest.mark.torch
WARMUP, STEPS, LR = 5, 40, 0.01
WSD = "warmup_stable_decay"
CASES: list[tuple[str, dict[str, Any], float, str, dict[str, Any]]] = [
    # The recipe's schedule, options and min_lr; transformers' schedule and options.
    ("constant", {}, 0.0, "constant_with_warmup", {}),
    ("linear", {}, 0.0, "linear", {}),
    ("cosine", {}, 0.0, "cosine", {}),
    ("cosine", {}, 0.001, "cosine_with_min_lr", {"min_lr": 0.001}),
    ("cosine_with_restarts", {"num_cycles": 3}, 0.0, "cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"power": 2.0}, 0.001, "polynomial", {"power": 2.0, "lr_end": 0.001}),
    ("inverse_sqrt", {}, 0.0, "inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 20}, 0.0, "inverse_sqrt", {"timescale": 20}),
    (WSD, {}, 0.0, WSD, {"num_decay_steps": 4}),
    (WSD, {"num_decay_steps": 8, "decay_type": "1-sqrt"}, 0.0, WSD, {"num_decay_steps": 8, "decay_type": "1-sqrt"}),
    (WSD, {"num_decay_steps": STEPS - WARMUP}, 0.0, WSD, {"num_decay_steps": STEPS - WARMUP}),
    (WSD, {"decay_type": "linear"}, 0.002, WSD, {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.2}),
]


def rates(schedule: str, options: dict[str, Any], min_lr: float) -> list[float]:
    train = SimpleNamespace(
        lr_scheduler_type=schedule, lr_scheduler_kwargs=options, lr=LR, warmup_steps=WARMUP, min_lr=min_lr
    )
    config: Any = SimpleNamespace(steps=STEPS, train=train)
    rate = learning_rate(config)
    return [rate(step) for step in range(STEPS)]


@pytest.mark.parametrize(("schedule", "options", "min_lr", "theirs", "their_options"), CASES)
def test_each_step_after_the_warm_up_has_the_rate_of_transformers(
    schedule: str, options: dict[str, Any], min_lr: float, theirs: str, their_options: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    scheduler = get_scheduler(theirs, optimizer, WARMUP, STEPS, their_options)
    wanted = []
    for _ in range(STEPS):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(schedule, options, min_lr)[WARMUP:] == pytest.approx(wanted[WARMUP:], abs=1e-12)


def test_every_schedule_of_a_recipe_is_beside_its_own() -> None:
    assert {case[0] for case in CASES} == {*get_args(Train.model_fields["lr_scheduler_type"].annotation)}


def test_a_warm_up_begins_above_0_and_ends_at_the_peak() -> None:
    assert rates("linear", {}, 0.0)[: WARMUP + 1] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.01])
