"""The learning rate at a step: a function of the step alone, so that nothing of it need be saved."""

from __future__ import annotations

import math

from dray.train.config import Config


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of the next step, counted from 0. It is never 0: such a step would learn nothing."""
    train = config.train
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    after = (step - train.warmup_steps) / max(1, config.steps - train.warmup_steps)
    height = train.lr - train.min_lr
    match train.lr_scheduler_type:
        case "linear":
            return train.min_lr + height * (1 - after)
        case "cosine":
            return train.min_lr + height * 0.5 * (1 + math.cos(math.pi * after))
        case "cosine_with_restarts":
            return train.min_lr + height * 0.5 * (1 + math.cos(math.pi * (train.lr_cycles * after % 1)))
        case "polynomial":
            return train.min_lr + height * math.pow(1 - after, train.lr_power)
        case _:
            return train.lr
