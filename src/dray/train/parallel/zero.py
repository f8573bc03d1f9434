"""zero1 to zero3: DeepSpeed's stages, which shard the optimizer, then gradients, then weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from dray.contract.findings import ConfigError
from dray.train.checkpoint.shards import Reader, Shard, Shards, divided, whole
from dray.train.config import Config
from dray.train.errors import message
from dray.train.objectives.base import Batch, LossModule
from dray.train.parallel.base import KINDS, MOMENTS, adamw, buffers
from dray.train.parallel.replicas import Replicas
from dray.train.parallel.scaler import Scaler, refuse

_GATHERED = 1 << 24  # numbers that are made whole at once
Named = list[tuple[str, Any]]
"""Weights, which have DeepSpeed's attributes."""


class Zero:
    """train.offload keeps the optimizer, or weights too, in the host's memory."""

    def __init__(self, module: LossModule, config: Config, device: torch.device) -> None:
        self.device, self.network = device, module.network
        self._stage = int(config.train.strategy.removeprefix("zero"))
        self.scaler = Scaler(config.train.initial_loss_scale, device) if config.train.precision == "fp16" else None
        if self._stage == 3:  # weight by weight, so that no rank ever has the whole model
            deepspeed.zero.Init(module=self.network, config_dict_or_path=settings(config))
        else:
            self.network.to(device)
        for buffer in self.network.buffers():  # DeepSpeed copies weights to all ranks, and not these
            buffer.data = buffer.data.to(device)
            dist.broadcast(buffer.data, 0)
        optimizer = adamw(self.network.parameters(), config)
        try:
            self._engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=settings(config))[0]
        except (ValueError, AssertionError) as error:
            raise ConfigError(
                "DeepSpeed refuses these settings",
                wanted="settings that DeepSpeed knows, and a precision that this device has",
                found=message(error, 400),
                fix="correct train.precision, or the file that train.deepspeed names",
            ) from error
        self._prime()
        self._named = [(name, weight) for name, weight in self.network.named_parameters() if weight.requires_grad]

    def _prime(self) -> None:
        """Give AdamW its averages now: a checkpoint may be loaded before the first step.

        Seen with DeepSpeed 0.19.8: it ties weights to the averages of all groups as soon as the first has some.
        """
        optimizer = self._engine.optimizer
        name = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        for flat in getattr(optimizer, name):
            moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
            optimizer.optimizer.state[flat] = {"step": torch.tensor(0.0, device=flat.device), **moments}
        if self._stage < 3:
            optimizer._lazy_init_hp_params_optimizer_state()

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._engine(*batch.inputs)
        return found

    @contextmanager
    def accumulate(self, *, sync: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(sync)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self, lr: float) -> torch.Tensor:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        try:
            self._engine.step()
        except Exception as error:
            if self.scaler and "minimum" in str(error):  # DeepSpeed has no class for it
                refuse(self.scaler.scale)
            raise
        if self.scaler:
            self.scaler.load([float(self._engine.optimizer.cur_scale), int(self._engine.skipped_steps), 0])
        norm = self._engine.get_global_grad_norm()
        return norm if isinstance(norm, torch.Tensor) else torch.full((), norm or 0.0, device=self.device)

    def state(self) -> Shards:
        found = divided(whole("others", buffers(self.network)), dist.get_rank(), dist.get_world_size())
        for name, weight in self._named:
            shape = _shape(weight)
            for kind in KINDS:
                begin, values = self._shard(weight, kind)
                found[f"{kind}.{name}"] = Shard(tuple(shape), begin, values[: max(shape.numel() - begin, 0)])
        return found

    def _gathered(self, named: Named) -> Iterator[tuple[str, Any, torch.Tensor]]:
        """Each of these trained weights, and the whole of it on all ranks, a bucket at a time."""
        for bucket in _bucketize(named, _GATHERED):
            sizes = [_shape(weight).numel() for _, weight in bucket]
            flat = torch.zeros(sum(sizes), device=self.device)
            slots = torch.split(flat, sizes)
            for (_, weight), slot in zip(bucket, slots, strict=True):
                start, shard = self._shard(weight, "weights")
                slot[start : start + shard.numel()].copy_(shard[: max(slot.numel() - start, 0)])
            dist.all_reduce(flat.view(torch.int32))  # the sum of a number's bits and zeros is that number
            yield from ((*one, slot.view(_shape(one[1]))) for one, slot in zip(bucket, slots, strict=True))

    def _shard(self, weight: Any, kind: str) -> tuple[int, torch.Tensor]:  # noqa: ANN401  DeepSpeed's attributes
        """Where this rank's shard begins in the flattened tensor, and the shard; the last may go beyond the end."""
        if self._stage < 3:
            mapping = weight._hp_mapping
            if mapping is None:
                return 0, torch.empty(0)
            return mapping.lp_fragment_address.start, mapping.get_hp_fragment(None if kind == "weights" else kind).data
        found = safe_get_local_fp32_param(weight) if kind == "weights" else safe_get_local_optimizer_state(weight, kind)
        shard: torch.Tensor = found.detach().flatten()
        return dist.get_rank() * shard.numel(), shard

    def load(self, reader: Reader, updates: int) -> None:
        Replicas(dist.get_rank(), dist.get_world_size()).fill(whole("others", buffers(self.network)), reader)
        for name, weight in self._named:
            shape = _shape(weight)
            for kind in KINDS:
                begin, values = self._shard(weight, kind)
                own = values[: max(shape.numel() - begin, 0)]
                reader.fill({f"{kind}.{name}": Shard(tuple(shape), begin, own)})
                values[own.numel() :].zero_()  # beyond the tensor's end
                self._put(weight, kind, values)
        for _, weight, value in self._gathered([one for one in self._named if _is_whole(one[1])]):
            weight.data.copy_(value)
        if self.scaler:
            self._engine.optimizer.cur_scale = self.scaler.scale
            self._engine.skipped_steps = self.scaler.skipped
        for state in self._engine.optimizer.optimizer.state.values():
            state["step"].fill_(float(updates))

    def _put(self, weight: Any, kind: str, values: torch.Tensor) -> None:  # noqa: ANN401  DeepSpeed's attributes
        """This rank's shard back; in stages 1 and 2 `_shard` gives the shard itself."""
        if self._stage < 3:
            return
        if kind == "weights":
            safe_set_local_fp32_param(weight, values)
            weight.ds_tensor.data.copy_(values)
        else:
            safe_set_local_optimizer_state(weight, values, kind)

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        full: torch.Tensor = safe_get_full_fp32_param(weight) if self._stage == 3 else weight
        return full.detach().float()

    def clamp(self, weight: Any, bound: torch.Tensor) -> None:  # noqa: ANN401  DeepSpeed's attributes
        start, shard = self._shard(weight, "weights")
        limit, end = bound.flatten().to(shard.device), shard.numel()
        if limit.numel() > 1:  # one for each row
            limit = limit[:, None].expand(_shape(weight)).flatten()[start : start + end]
            end = limit.numel()
        shard[:end].clamp_(-limit, limit)
        self._put(weight, "weights", shard)
        if _is_whole(weight):
            weight.data.clamp_(-bound, bound)

    def write(self, weight: Any, value: torch.Tensor) -> None:  # noqa: ANN401  DeepSpeed's attributes
        if self._stage < 3:
            if weight.requires_grad:
                safe_set_full_fp32_param(weight, value)
            weight.data.copy_(value)
            return
        shard = _own_shard(value, weight.ds_tensor.numel())
        if weight.requires_grad:
            safe_set_local_fp32_param(weight, shard)
        weight.ds_tensor.data.copy_(shard)
        if _is_whole(weight):
            weight.data.copy_(value.view_as(weight.data))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, _, value in self._gathered(self._named):
            yield name, value
        for name, weight in self.network.named_parameters():
            if not weight.requires_grad:
                yield name, self._frozen(weight)
        yield from buffers(self.network).items()

    def _frozen(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The whole of a frozen weight, of which the optimizer has no copy."""
        if self._stage < 3:
            return weight.detach()
        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()


def _shape(weight: Any) -> torch.Size:  # noqa: ANN401  DeepSpeed's attributes
    """Of the whole, which may be sharded."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def _is_whole(weight: Any) -> bool:  # noqa: ANN401  DeepSpeed's attributes
    """On every rank, all the time: all in stages 1 and 2, and in stage 3 small ones."""
    return bool(weight.data.numel() == _shape(weight).numel())


def _bucketize(named: Named, limit: int) -> Iterator[Named]:
    """In buckets of at most so many numbers, or of one weight."""
    bucket: Named = []
    size = 0
    for one in named:
        if bucket and size + _shape(one[-1]).numel() > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += _shape(one[-1]).numel()
    if bucket:
        yield bucket


def _own_shard(full: torch.Tensor, length: int) -> torch.Tensor:
    """This rank's shard of the flattened tensor; the last one is padded with zeros."""
    flat = full.flatten()
    begin = dist.get_rank() * length
    part = flat[begin : begin + length]
    return torch.nn.functional.pad(part, (0, length - part.numel()))


def settings(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration: the user's own file, and what the recipe decides over it."""
    host = {"device": "cpu", "pin_memory": config.variant != "cpu"}
    file = dict(config.deepspeed)
    stage = {**file.pop("zero_optimization", {}), "stage": int(config.train.strategy.removeprefix("zero"))}
    if config.train.offload:
        stage["offload_optimizer"] = {**host, **stage.get("offload_optimizer", {})}
    if config.train.offload == "all":
        stage["offload_param"] = {**host, **stage.get("offload_param", {})}
    fp16 = {
        **file.pop("fp16", {}),
        "initial_scale_power": round(math.log2(config.train.initial_loss_scale)),
        "enabled": config.train.precision == "fp16",
    }
    if config.train.precision != "fp32":  # as ddp and fsdp do it: DeepSpeed would sum gradients in 16 bits
        file.setdefault("communication_data_type", "fp32")
        if stage["stage"] > 1:
            file.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return {
        **file,
        "train_micro_batch_size_per_gpu": config.per_device,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.train.max_grad_norm,
        "bf16": {"enabled": config.train.precision == "bf16"},
        "fp16": fp16,
        "zero_optimization": stage,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW resumes to the last bit, DeepSpeed's does not
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }


STRATEGY = Zero
