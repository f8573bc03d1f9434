"""The learning rate, beside transformers' own schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from transformers import get_scheduler  # noqa: E402

from dray.train.loop.schedule import learning_rate  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("schedule", "theirs", "own", "said"),
    [
        ("constant", "constant", {}, {}),
        ("linear", "linear", {}, {}),
        ("cosine", "cosine", {}, {}),
        ("cosine_with_restarts", "cosine_with_restarts", {"lr_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", "polynomial", {"lr_power": 2.0, "min_lr": 0.001}, {"power": 2.0, "lr_end": 0.001}),
    ],
)
def test_each_step_has_the_rate_of_transformers(
    schedule: str, theirs: str, own: dict[str, Any], said: dict[str, Any]
) -> None:
    settings = {"lr": 0.01, "warmup_steps": 0, "min_lr": 0.0, "lr_power": 1.0, "lr_cycles": 1, **own}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    wanted = get_scheduler(theirs, optimizer, num_warmup_steps=0, num_training_steps=20, scheduler_specific_kwargs=said)
    config: Any = SimpleNamespace(steps=20, train=SimpleNamespace(lr_scheduler_type=schedule, **settings))
    for step in range(20):
        found = learning_rate(config, step)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        wanted.step()


def test_a_warm_up_ends_at_the_peak() -> None:
    train = SimpleNamespace(lr_scheduler_type="linear", lr=0.01, warmup_steps=4, min_lr=0.0)
    config: Any = SimpleNamespace(steps=6, train=train)
    assert [learning_rate(config, step) for step in range(6)] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.005]
    )
