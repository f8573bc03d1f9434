"""The optimizer of every strategy. Each has its state before the first step, for checkpoints of any moment."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dray.train.config import Config

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weights", *MOMENTS)
"""What a checkpoint holds of each weight that AdamW trains. Its `others` are the model's buffers."""


def adamw(weights: Iterable[torch.nn.Parameter], config: Config) -> torch.optim.AdamW:
    """Return AdamW for the weights that are trained; biases and norms have no weight decay."""
    train = config.train
    trained = [weight for weight in weights if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [weight for weight in trained if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def initial_state(weight: torch.Tensor, updates: int = 0) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a weight after so many updates, with averages of zero."""
    averages = {moment: torch.zeros_like(weight) for moment in MOMENTS}
    return {"step": torch.tensor(float(updates), device=weight.device), **averages}
