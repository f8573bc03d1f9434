"""What a strategy does for the loop: compute a loss, run its backward pass, update the weights.

Whatever the strategy, a checkpoint holds the same tensors by the same names, so that any resumes from any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from dray.contract.findings import ConfigError
from dray.train.checkpoint.shards import Reader, Shards
from dray.train.collectives import all_gather_json, broadcast_json
from dray.train.config import Config
from dray.train.objectives.base import Batch
from dray.train.parallel.scaler import Scaler

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weights", *MOMENTS)
"""What a checkpoint holds of each weight that is trained. Its `others` are the model's buffers."""


class Strategy(Protocol):
    """What the loop, evaluation and checkpoints use of a strategy."""

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
        """This rank's part of a checkpoint, without a copy. Together the ranks have each number once."""

    def load(self, reader: Reader, updates: int) -> None:
        """Read it back on any number of ranks; all ranks call it."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight and buffer by name, whole, a few at a time; all ranks iterate together."""

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The whole weight in fp32, with the model's shape."""

    def clamp(self, weight: torch.nn.Parameter, bound: torch.Tensor) -> None:
        """Clamp the weight, wherever it is kept; `bound` is one number, or one for each row."""

    def write(self, weight: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Set the weight, wherever it is kept; each rank passes the same value."""


def check_same(network: torch.nn.Module) -> None:
    """Wait until all ranks have the network, and refuse if it differs between ranks."""
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
    """The buffers that a checkpoint holds."""
    kept = network.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in network.named_buffers() if name in kept}
