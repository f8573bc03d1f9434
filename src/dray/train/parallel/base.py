"""What a strategy does for the loop: compute a loss, run its backward pass, update the weights.

Checkpoints of all strategies hold the same tensors by the same names, so a run of any strategy resumes from each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from dray.contract.findings import ConfigError
from dray.train.checkpoint.shards import Reader, Shards
from dray.train.collectives import all_gather_json, broadcast_json
from dray.train.objectives.base import Batch
from dray.train.parallel.scaler import Scaler


class Strategy(Protocol):
    """What the loop, evaluation and checkpoints use of a strategy."""

    device: torch.device
    network: torch.nn.Module
    scaler: Scaler | None

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward pass; return the sum of the losses and, in evaluation, the counts of right labels and rows."""

    def accumulate(self, *, sync: bool) -> Any:  # noqa: ANN401  a context manager
        """Surround one micro-batch; `sync` is true for a step's last one, which sums the gradients over ranks."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass. The step's gradient is the mean over ranks of the sum over micro-batches."""

    def update(self, lr: float) -> torch.Tensor:
        """Take one step of the optimizer; return the gradients' norm before clipping."""

    def state(self) -> Shards:
        """Return this rank's part of a checkpoint, without a copy. Each number is in the part of one rank."""

    def load(self, reader: Reader, updates: int) -> None:
        """Load a checkpoint of any number of ranks; all ranks call it."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight and buffer by name, whole; all ranks iterate together."""

    def use_averages(self) -> None:
        """Replace the weights by their averages of train.ema_decay, if it is set."""

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return the whole weight in fp32; all ranks call it."""

    def write(self, weight: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Set the weight; each rank passes the same value."""


def check_same(network: torch.nn.Module) -> None:
    """Wait until all ranks have built the network; refuse one that differs between ranks."""
    tensors = (*network.named_parameters(), *network.named_buffers())
    own = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors]
    same = all_gather_json(broadcast_json(own) == own)
    if not all(same):
        raise ConfigError(
            "the ranks have built different networks",
            wanted="the same names, shapes and types of weights as on rank 0",
            found=f"others on rank {', '.join(str(rank) for rank, is_same in enumerate(same) if not is_same)}",
            fix="check that tie_word_embeddings in the model's config.json fits its weights",
        )


def buffers(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint holds."""
    kept = network.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in network.named_buffers() if name in kept}
