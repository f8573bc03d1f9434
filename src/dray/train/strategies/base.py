"""What a strategy does for the loop. The loop asks for a loss, hands it back, and has the weights updated; no more.

Whatever the strategy, a checkpoint holds the same tensors by the same names, so that any resumes from any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from dray.contract.findings import ConfigError
from dray.train.collectives import all_gather_json, broadcast_json
from dray.train.config import Config
from dray.train.objectives.base import Batch
from dray.train.scaler import Scaler
from dray.train.shards import Reader, Shards

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weights", *MOMENTS)
"""What a checkpoint holds of each weight that is trained. Its `others` are the model's buffers."""


class Strategy(Protocol):
    """What the loop, evaluation and checkpoints know of it."""

    device: torch.device
    network: torch.nn.Module
    scaler: Scaler | None

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass: the sum of the losses, and in evaluation how many labels were predicted, and whole rows."""

    def accumulate(self, *, sync: bool) -> Any:  # noqa: ANN401  a context manager
        """Around one micro-batch; gradients are summed over ranks in a step's last one alone, which has `sync`."""

    def backward(self, loss: torch.Tensor) -> None:
        """One backward pass. The step's gradient is the mean over ranks of the sum over micro-batches."""

    def update(self, lr: float) -> torch.Tensor:
        """One step of the optimizer; the gradients' norm before they were clipped."""

    def state(self) -> Shards:
        """What this rank writes of a checkpoint. Between them the ranks have each number once; nothing is copied."""

    def load(self, reader: Reader, updates: int) -> None:
        """The same back, on any number of ranks, all together."""

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, on rank 0."""

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The whole of it, as the model has it, in 32 bits."""

    def clamp(self, weight: torch.nn.Parameter, bound: torch.Tensor) -> None:
        """No part of it beyond this, wherever it is kept; the bound is one number, or one for each row."""

    def write(self, weight: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Another value for it, wherever it is kept; each rank has the same."""


def check_same(network: torch.nn.Module) -> None:
    """Wait until all ranks have the network, and see that it is the same: else weights would go astray."""
    named = (*network.named_parameters(), *network.named_buffers())
    own = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named]
    same = all_gather_json(broadcast_json(own) == own)
    if not all(same):
        raise ConfigError(
            "the ranks have built different networks",
            wanted="rank 0's weights, as its files have them",
            found=f"others on rank {', '.join(str(rank) for rank, one in enumerate(same) if not one)}",
            fix="check that tie_word_embeddings in the model's config.json fits its weights",
        )


def adamw(weights: Iterable[torch.nn.Parameter], config: Config) -> torch.optim.AdamW:
    """The one optimizer of all strategies. Biases and norms have no weight decay."""
    train = config.train
    weights = [weight for weight in weights if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def buffers(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that a checkpoint holds."""
    kept = network.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in network.named_buffers() if name in kept}
