"""The learning rate by transformers' schedules. It depends on the step alone, so no checkpoint holds any of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import get_scheduler

from dray.contract.findings import ConfigError
from dray.train.config import Config


def learning_rate(config: Config) -> Callable[[int], float]:
    """Return the learning rate by the step, counted from 0. Unlike transformers' the first one is above 0."""
    train, warmup = config.train, config.train.warmup_steps
    decay = train.lr_scheduler_kwargs.get("num_decay_steps", 0)
    if decay > config.steps - warmup:  # the plan refuses it if the recipe sets steps
        raise ConfigError(
            "the decay of the learning rate is longer than the training after the warm-up",
            where="train.lr_scheduler_kwargs.num_decay_steps",
            wanted=f"at most {config.steps - warmup} of {config.steps} steps",
            found=decay,
            fix="set a smaller num_decay_steps, or more train.epochs",
        )
    defaults: dict[str, dict[str, Any]] = {
        "polynomial": {"lr_end": 0.0},
        "warmup_stable_decay": {"num_decay_steps": max(1, config.steps // 10)},
    }
    options = defaults.get(train.lr_scheduler_type, {}) | train.lr_scheduler_kwargs
    if "num_decay_steps" in options:  # if there were more, the schedule would begin in the middle of its decay
        options["num_decay_steps"] = min(options["num_decay_steps"], max(1, config.steps - warmup))
    scheduler: Any = get_scheduler(
        train.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=config.steps,
        scheduler_specific_kwargs=options,
    )
    (factor,) = scheduler.lr_lambdas

    def learning_rate_at(step: int) -> float:
        if step < warmup:
            return train.lr * (step + 1) / warmup
        return train.min_lr + (train.lr - train.min_lr) * float(factor(step))

    return learning_rate_at
