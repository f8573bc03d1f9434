"""ddp: each rank has the whole model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dray.train.checkpoint.shards import Reader, Shards, whole
from dray.train.config import Config
from dray.train.model import lora
from dray.train.objectives.base import Batch, LossModule
from dray.train.parallel.base import MOMENTS, adamw, buffers
from dray.train.parallel.replicas import Replicas
from dray.train.parallel.scaler import Scaler

# What is not a product of 8 bits is one of 16.
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp8_tensorwise": torch.bfloat16}


class Ddp:
    """torch's own optimizer and gradients, which fsdp has too."""

    autocasts = True
    """Whether autocast makes the types of the products."""

    def __init__(self, module: LossModule, config: Config, device: torch.device) -> None:
        self.device, self.config, self.network = device, config, module.network
        self.scaler = Scaler(config.train.initial_loss_scale, device) if config.train.precision == "fp16" else None
        half = HALF.get(config.train.precision)
        autocast = half is not None and self.autocasts
        self._autocast = torch.autocast(device.type, half or torch.bfloat16, enabled=autocast)
        self._module = self._distributed(module)
        self._optimizer: Any = adamw(map(self._moved, self.network.parameters()), config)
        self._prime(updates=0)

    def _prime(self, updates: int) -> None:
        """Give AdamW its averages now: a checkpoint may be loaded, or written, before a step was taken."""
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                moments = {moment: torch.zeros_like(weight) for moment in MOMENTS}
                step = torch.tensor(float(updates), device=weight.device)
                self._optimizer.state[weight] = {"step": step, **moments}

    def _distributed(self, module: LossModule) -> torch.nn.Module:
        self.network.to(self.device)
        if dist.get_world_size() == 1:
            return module
        ids = None if self.device.type == "cpu" else [self.device.index]
        one_node = dist.get_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = DistributedDataParallel(
            module, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=25 if one_node else 100
        )
        # Only now: older torches would not copy rank 0's at the start either.
        found.broadcast_buffers = any(map(_writes_buffers, self.network.modules()))
        _order_buckets(found)
        return found

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with self._autocast:
            found: tuple[torch.Tensor, torch.Tensor] = self._module(*batch.inputs)
        return found

    @contextmanager
    def accumulate(self, *, sync: bool) -> Iterator[None]:
        if isinstance(self._module, DistributedDataParallel) and not sync:
            with self._module.no_sync():
                yield
        else:
            yield

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss * self.scaler.numbers[0].to(loss.dtype) if self.scaler else loss)

    def update(self, lr: float) -> torch.Tensor:
        gradients = self._gradients()
        norm = self._norm(gradients)
        divisor = torch.ones_like(norm)
        if self.scaler:
            divisor = self.scaler.numbers[0].float()
            norm = norm / divisor
        if self.config.train.max_grad_norm > 0:
            divisor = divisor * ((norm + 1e-6) / self.config.train.max_grad_norm).clamp(min=1)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # A fused step divides each gradient as it reads it: clipping costs no pass of its own.
        self._optimizer.grad_scale = divisor
        if self.scaler:  # a fused step with found_inf changes nothing, its own count included
            self._optimizer.found_inf = self.scaler.update(norm)
        self._optimizer.step()
        self._drop_gradients()
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        """The gradients of what the optimizer moves."""
        moved = (weight for group in self._optimizer.param_groups for weight in group["params"])
        return [weight.grad for weight in moved if weight.grad is not None]

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Their norm over all ranks."""
        return torch.nn.utils.get_total_norm(gradients).float()

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> Shards:
        return {name: shard for own, replicas in self._held() for name, shard in replicas.part(own).items()}

    def load(self, reader: Reader, updates: int) -> None:
        self._prime(updates)
        for own, replicas in self._held():
            replicas.fill(own, reader)

    def _held(self) -> Iterator[tuple[Shards, Replicas]]:
        """What this rank has, and which ranks have the same."""
        yield self._shards(), Replicas(dist.get_rank(), dist.get_world_size())

    def _shards(self) -> Shards:
        return {name: shard for kind, named in self._tensors().items() for name, shard in whole(kind, named).items()}

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        named = dict(self._named())
        if lora.on(self.network):  # the others are frozen
            named = {name: weight for name, weight in named.items() if weight.requires_grad}
        moved = {name: self._moved(weight) for name, weight in named.items()}
        found = {"weights": {name: weight.detach() for name, weight in moved.items()}}
        for moment in MOMENTS:
            found[moment] = {
                name: self._optimizer.state[weight][moment] for name, weight in moved.items() if weight.requires_grad
            }
        return {**found, "others": buffers(self.network)}

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.network.named_parameters()

    def _moved(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        """What the optimizer moves in the place of the weight."""
        return weight

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        return weight.detach().float()

    def clamp(self, weight: torch.nn.Parameter, bound: torch.Tensor) -> None:
        weight.data.clamp_(-bound, bound)

    def write(self, weight: torch.nn.Parameter, value: torch.Tensor) -> None:
        weight.data.copy_(value)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in (*self._named(), *buffers(self.network).items()):
            yield name, (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


def _order_buckets(model: DistributedDataParallel) -> None:
    """Run a dummy backward pass, so that DDP fixes the order of its buckets now.

    Else the first step after a resume would sum the ranks' gradients in another order than a run without a stop.
    """
    model.reducer.prepare_for_backward([])
    # The last weights of a model have their gradients first.
    sums = [weight.sum().float() for weight in model.parameters() if weight.requires_grad]
    torch.autograd.backward(torch.stack(sums).sum())
    model.zero_grad(set_to_none=True)
    model.reducer._rebuild_buckets()


def _writes_buffers(module: torch.nn.Module) -> bool:
    """Whether a forward pass of it writes buffers, in which the ranks would then differ."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) or hasattr(module, "input_range_update_idx")


STRATEGY = Ddp
