"""ddp: each rank has the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dray.train import ranks
from dray.train.checkpoint.shards import Reader, Shard, Shards, whole_shards
from dray.train.config import Config
from dray.train.model import lora
from dray.train.objectives.base import Batch, LossModule
from dray.train.parallel.base import buffers
from dray.train.parallel.optimizer import average_weights, optimizers, reset
from dray.train.parallel.replicated_checkpoint import Replicas
from dray.train.parallel.scaler import Scaler

# The 16-bit type of each train.precision; with fp8 it is that of all products but those of 8 bits.
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp8_tensorwise": torch.bfloat16}


class Ddp:
    """The ddp strategy. fsdp inherits its optimizers and its checkpoints."""

    autocasts = True
    """Whether torch.autocast casts inputs; fsdp's MixedPrecisionPolicy does it instead."""

    def __init__(self, module: LossModule, config: Config, device: torch.device) -> None:
        self.device, self.config, self.network = device, config, module.network
        self.scaler = Scaler(config.train.initial_loss_scale, device) if config.train.precision == "fp16" else None
        half = HALF.get(config.train.precision)
        enabled = half is not None and self.autocasts
        self._autocast = torch.autocast(device.type, half or torch.bfloat16, enabled=enabled)
        self._replicas = Replicas(ranks.rank(), ranks.world())
        """The ranks with the same weights."""
        self._shard_group: dist.ProcessGroup | None = None
        """The ranks that share one copy of the weights; None: each has all of it."""
        self._module = self._distributed(module)
        self._optimizers = optimizers(self.network, self._optimized, config, self._shard_group)

    def _distributed(self, module: LossModule) -> torch.nn.Module:
        self.network.to(self.device)
        if ranks.world() == 1:
            return module
        model = DistributedDataParallel(
            module,
            device_ids=None if self.device.type == "cpu" else [self.device.index],
            gradient_as_bucket_view=True,
            bucket_cap_mb=25 if ranks.world() == ranks.local_world() else 100,
        )
        # DDP has sent rank 0's buffers to all ranks. Later only analog layers and BatchNorm change buffers.
        is_batch_norm = (isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in self.network.modules())
        model.broadcast_buffers = self.config.analog is not None or any(is_batch_norm)
        _order_buckets(model)
        return model

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with self._autocast:
            losses: tuple[torch.Tensor, torch.Tensor] = self._module(*batch.inputs)
        return losses

    def accumulate(self, *, sync: bool) -> AbstractContextManager[None]:
        if isinstance(self._module, DistributedDataParallel) and not sync:
            return self._module.no_sync()
        return nullcontext()

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
        found_inf = self.scaler.update(norm) if self.scaler else None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            # A fused step divides each gradient as it reads it, so clipping needs no pass of its own.
            optimizer.grad_scale = divisor
            optimizer.found_inf = found_inf  # if it is 1, the step changes nothing, not even its count
            optimizer.step()
        if self.config.train.ema_decay:
            average_weights(self._optimizers, self.config.train.ema_decay)
        self._drop_gradients()
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the tensors that the optimizers update."""
        weights = (weight for optimizer in self._optimizers for weight in optimizer.state)
        return [weight.grad for weight in weights if weight.grad is not None]

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the gradients' norm over all ranks."""
        return torch.nn.utils.get_total_norm(gradients).float()

    def _drop_gradients(self) -> None:
        self.network.zero_grad(set_to_none=True)

    def state(self) -> Shards:
        shards: Shards = {}
        for all_shards, replicas in self._checkpoint_parts():
            shards |= replicas.part(all_shards)
        return shards

    def load(self, reader: Reader, updates: int) -> None:
        reset(self._optimizers, self.config, updates)
        for shards, replicas in self._checkpoint_parts():
            replicas.fill(shards, reader)

    def _checkpoint_parts(self) -> Iterator[tuple[Shards, Replicas]]:
        """Yield shards that this rank has, and the ranks that have the same ones."""
        yield self._shards(), self._replicas
        yield whole_shards("others", buffers(self.network)), Replicas(ranks.rank(), ranks.world())

    def _shards(self) -> Shards:
        shards = {}
        for name, weight in self._named_weights():
            if lora.on(self.network) and not weight.requires_grad:
                continue  # the model's own files have it
            optimized = self._optimized(weight)
            states = (optimizer.state[optimized] for optimizer in self._optimizers if optimized in optimizer.state)
            for kind, values in {"weights": optimized.detach(), **next(states, {})}.items():
                if kind != "step":  # it is in the manifest
                    shards[f"{kind}.{name}"] = Shard(tuple(weight.shape), self._begin(weight), values)
        return shards

    def _named_weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.network.named_parameters()

    def _optimized(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the tensor that the optimizer updates for this weight; with fsdp the local shard."""
        return weight

    def _begin(self, weight: torch.nn.Parameter) -> int:
        """Return where this rank's numbers begin in the flattened weight."""
        del weight
        return 0

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        return weight.detach().float()

    def write(self, weight: torch.nn.Parameter, value: torch.Tensor) -> None:
        weight.data.copy_(value)

    @torch.no_grad()
    def use_averages(self) -> None:
        for optimizer in self._optimizers:
            for weight, state in optimizer.state.items():
                weight.copy_(state.get("ema", weight))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in (*self._named_weights(), *buffers(self.network).items()):
            yield name, (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


def _order_buckets(model: DistributedDataParallel) -> None:
    """Run a dummy backward pass, so that DDP orders its buckets now.

    Else DDP orders them anew after its first step, and the first step after a resume would sum the ranks' gradients in
    another order than the same step of a run without a stop.
    """
    model.reducer.prepare_for_backward([])
    # As in a real backward pass, the last weights of the model get their gradients first.
    sums = [weight.sum().float() for weight in model.parameters() if weight.requires_grad]
    torch.autograd.backward(torch.stack(sums).sum())
    model.zero_grad(set_to_none=True)
    model.reducer._rebuild_buckets()


STRATEGY = Ddp
