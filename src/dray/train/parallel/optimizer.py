"""AdamW, and Muon for hidden matrices: those between embeddings and head.

Each optimizer has its state before the first step, since a checkpoint may be written or loaded then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from dray.train.config import Config

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weights", *MOMENTS)
"""What a checkpoint holds of each weight that AdamW trains. Its `others` are the model's buffers."""
_MUON_MOMENTS = ("momentum_buffer",)
_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of torch.optim.Muon, which runs five iterations."""


class Muon(torch.optim.Optimizer):
    """Muon as torch.optim.Muon has it with `match_rms_adamw`, so that AdamW's learning rate fits.

    torch's needs each matrix whole on every rank. Here each rank orthogonalizes its share of the matrices: those that
    fsdp shards are gathered there, and scattered again.
    """

    grad_scale: Any
    found_inf: Any = None
    """Tensors, set before each step: the divisor of all gradients, and 1 if one of them is not finite."""

    def __init__(
        self, shapes: dict[torch.nn.Parameter, torch.Size], config: Config, shard_group: dist.ProcessGroup | None
    ) -> None:
        """`shapes` has the weights. The ranks of `shard_group` share the rows of each; None: each rank has all rows."""
        super().__init__(list(shapes), {"lr": config.train.lr, "weight_decay": config.train.weight_decay})
        self._shapes, self._sharded = shapes, shard_group is not None
        group: Any = shard_group or dist.group.WORLD
        self._group, self._rank, self._size = group, group.rank(), group.size()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each weight; with `found_inf` nothing changes, as in torch's fused optimizers."""
        del closure
        (settings,) = self.param_groups
        rate = settings["lr"] if self.found_inf is None else settings["lr"] * (1 - self.found_inf)
        weights = [weight for weight in settings["params"] if weight.grad is not None]
        updates = [self._momentum(weight) for weight in weights]
        # Gather all first, so that the ranks orthogonalize at the same time.
        matrices = [
            self._gather(number, update, self._shapes[weights[number]]) for number, update in enumerate(updates)
        ]
        for matrix in matrices[self._rank :: self._size]:
            matrix.copy_(orthogonalize(matrix))
        for number, weight in enumerate(weights):
            self._scatter(number, matrices[number], updates[number], self._shapes[weight])
            weight.mul_(1 - rate * settings["weight_decay"])
            size = 0.2 * math.sqrt(max(self._shapes[weight]))
            weight.sub_(updates[number].to(weight.dtype) * (rate * size))

    def _momentum(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """Update the momentum; return Nesterov's direction in 16 bits."""
        momentum: torch.Tensor = self.state[weight]["momentum_buffer"]
        gradient: torch.Tensor = weight.grad / self.grad_scale
        if self.found_inf is not None:
            gradient = torch.where(self.found_inf > 0, momentum, gradient)
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(momentum, _MOMENTUM).bfloat16()

    def _gather(self, number: int, update: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the whole update on the rank that orthogonalizes it, and this rank's rows on the others."""
        if not self._sharded:
            return update
        owner, parts = number % self._size, None
        padded = _pad(update, -(-shape[0] // self._size))
        if owner == self._rank:
            parts = [torch.empty_like(padded) for _ in range(self._size)]
        dist.gather(padded, parts, group=self._group, group_dst=owner)
        return update if parts is None else torch.cat(parts)[: shape[0]]

    def _scatter(self, number: int, matrix: torch.Tensor, update: torch.Tensor, shape: torch.Size) -> None:
        """Receive this rank's rows of the update from the rank that has orthogonalized it."""
        owner, parts = number % self._size, None
        if not self._sharded:
            dist.broadcast(update, group=self._group, group_src=owner)
            return
        rows = -(-shape[0] // self._size)
        if owner == self._rank:
            parts = list(torch.split(_pad(matrix, rows * self._size), rows))
        received = update.new_empty(rows, shape[1])
        dist.scatter(received, parts, group=self._group, group_src=owner)
        update.copy_(received[: len(update)])


def _pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return approximately the nearest matrix with orthogonal rows or columns, by five Newton-Schulz iterations."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    first, third, fifth = _NEWTON_SCHULZ
    for _ in range(5):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        wide = torch.addmm(wide, polynomial, wide, beta=first)
    return wide.T if is_tall else wide


def optimizers(
    network: Any,  # noqa: ANN401  a transformers model
    optimized: Callable[[torch.nn.Parameter], torch.nn.Parameter],
    config: Config,
    shard_group: dist.ProcessGroup | None,
) -> list[Any]:
    """Return the optimizers of train.optimizer; `optimized(weight)` is the tensor that the optimizer updates."""
    matrices = _hidden_matrices(network) if config.train.optimizer == "muon" else set()
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    found: list[Any] = [adamw([optimized(weight) for weight in trained if weight not in matrices], config)]
    if matrices:
        shapes = {optimized(weight): weight.shape for weight in trained if weight in matrices}
        found.append(Muon(shapes, config, shard_group))
    reset(found, config, updates=0)
    return found


def _hidden_matrices(network: Any) -> set[torch.nn.Parameter]:  # noqa: ANN401  a transformers model
    """Return the trained matrices that are neither embeddings nor the head."""
    tables = [module for module in network.modules() if isinstance(module, torch.nn.Embedding)]
    outside = {table.weight for table in (*tables, network.get_output_embeddings()) if table is not None}
    weights = (weight for weight in network.parameters() if weight.requires_grad and weight.dim() == 2)
    return {weight for weight in weights if weight not in outside}


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


def reset(optimizers: Iterable[torch.optim.Optimizer], config: Config, updates: int) -> None:
    """Set each weight's state to that after `updates` steps: moments are zero, the EMA is a copy of the weight."""
    for optimizer in optimizers:
        moments = _MUON_MOMENTS if isinstance(optimizer, Muon) else MOMENTS
        for group in optimizer.param_groups:
            for weight in group["params"]:
                optimizer.state[weight] = initial_state(weight, moments, updates)
                if config.train.ema_decay:
                    optimizer.state[weight]["ema"] = weight.detach().to(torch.float32, copy=True)


@torch.no_grad()
def average_weights(optimizers: Iterable[torch.optim.Optimizer], decay: float) -> None:
    """Move each weight's average towards the weight, after a step."""
    for optimizer in optimizers:
        weights = [weight.float() for weight in optimizer.state]
        averages = [state["ema"] for state in optimizer.state.values()]
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)


def initial_state(weight: torch.Tensor, moments: tuple[str, ...] = MOMENTS, updates: int = 0) -> dict[str, Any]:
    """Return the state of one weight after so many updates, with averages of zero."""
    averages = {moment: torch.zeros_like(weight) for moment in moments}
    return {"step": torch.tensor(float(updates), device=weight.device), **averages}
