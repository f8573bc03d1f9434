"""The learning rate at a step: a function of the step alone, so that nothing of it need be saved."""

from __future__ import annotations

import math

from dray.train.config import Config


def rate(config: Config, step: int) -> float:
    """For the step that is about to be taken, the first being 0. No step is taken at 0: it would learn nothing."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    after = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    height = config.lr - config.min_lr
    match config.lr_scheduler_type:
        case "linear":
            return config.min_lr + height * (1 - after)
        case "cosine":
            return config.min_lr + height * 0.5 * (1 + math.cos(math.pi * after))
        case "cosine_with_restarts":
            return config.min_lr + height * 0.5 * (1 + math.cos(math.pi * (config.lr_cycles * after % 1)))
        case "polynomial":
            return config.min_lr + height * math.pow(1 - after, config.lr_power)
        case _:
            return config.lr
