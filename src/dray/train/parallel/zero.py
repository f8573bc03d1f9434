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
from dray.train import ranks
from dray.train.checkpoint.shards import Reader, Shard, Shards, divided, whole_shards
from dray.train.config import Config
from dray.train.errors import message
from dray.train.model import lora
from dray.train.objectives.base import Batch, LossModule
from dray.train.parallel.base import buffers
from dray.train.parallel.optimizer import KINDS, adamw, initial_state
from dray.train.parallel.replicated_checkpoint import Replicas
from dray.train.parallel.scaler import Scaler, refuse


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
        self._optimizer: Any = self._engine.optimizer
        weights = [*self.network.named_parameters()]
        self._trained = [(name, weight) for name, weight in weights if weight.requires_grad]
        # Such as input ranges of analog layers, which may follow the data. LoRA's base is in the model's own files.
        frozen = [(name, weight) for name, weight in weights if not weight.requires_grad]
        self._frozen = [] if lora.on(self.network) else frozen
        # Seen with DeepSpeed 0.19.8: once the first group has state, it links weights to that of all. So fill all.
        name = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        for group in getattr(self._optimizer, name):
            self._optimizer.optimizer.state[group] = initial_state(group)
        if self._stage < 3:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses: tuple[torch.Tensor, torch.Tensor] = self._engine(*batch.inputs)
        return losses

    @contextmanager
    def accumulate(self, *, sync: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(sync)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self, lr: float) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        try:
            self._engine.step()
        except Exception as error:
            if self.scaler and "minimum" in str(error):  # DeepSpeed has no class for it
                refuse(self.scaler.scale)
            raise
        if self.scaler:
            self.scaler.load([float(self._optimizer.cur_scale), int(self._engine.skipped_steps), 0])
        norm = self._engine.get_global_grad_norm()
        return norm if isinstance(norm, torch.Tensor) else torch.full((), norm or 0.0, device=self.device)

    def state(self) -> Shards:
        shards = divided(self._replicated(), ranks.rank(), ranks.world())
        for name, weight in self._trained:
            shards.update({f"{kind}.{name}": self._shard(weight, kind) for kind in KINDS})
        return shards

    def _replicated(self) -> Shards:
        """Return what is the same on all ranks."""
        frozen = {name: self.read(weight) for name, weight in self._frozen}
        return whole_shards("others", buffers(self.network)) | whole_shards("weights", frozen)

    def _shard(self, weight: Any, kind: str) -> Shard:  # noqa: ANN401  DeepSpeed's attributes
        """Return this rank's part of the weight, or of its average; in stages 1 and 2 it is DeepSpeed's own memory."""
        shape = _shape(weight)
        if self._stage < 3:
            mapping = weight._hp_mapping
            if mapping is None:
                return Shard(tuple(shape), 0, torch.empty(0))
            fragment = mapping.get_hp_fragment(None if kind == "weights" else kind)
            return Shard(tuple(shape), mapping.lp_fragment_address.start, fragment.data)
        values = (
            safe_get_local_fp32_param(weight) if kind == "weights" else safe_get_local_optimizer_state(weight, kind)
        )
        begin = ranks.rank() * values.numel()
        # The last shards are padded.
        return Shard(tuple(shape), begin, values.detach().flatten()[: max(shape.numel() - begin, 0)])

    def _put(self, weight: Any, kind: str, values: torch.Tensor) -> None:  # noqa: ANN401  DeepSpeed's attributes
        """Write stage 3's shard back, padded with zeros."""
        padded = torch.nn.functional.pad(values, (0, weight.ds_tensor.numel() - values.numel()))
        if kind == "weights":
            safe_set_local_fp32_param(weight, padded)
            weight.ds_tensor.data.copy_(padded)
        else:
            safe_set_local_optimizer_state(weight, padded, kind)

    def load(self, reader: Reader, updates: int) -> None:
        replicated = self._replicated()
        Replicas(ranks.rank(), ranks.world()).fill(replicated, reader)
        for name, weight in self._frozen:
            self.write(weight, replicated[f"weights.{name}"].values)
        for name, weight in self._trained:
            for kind in KINDS:
                shard = self._shard(weight, kind)
                reader.fill({f"{kind}.{name}": shard})
                if self._stage == 3:
                    self._put(weight, kind, shard.values)
            if _is_whole(weight):
                weight.data.copy_(self.read(weight))
        if self.scaler:
            self._optimizer.cur_scale = self.scaler.scale
            self._engine.skipped_steps = self.scaler.skipped
        for state in self._optimizer.optimizer.state.values():
            state["step"].fill_(float(updates))

    def use_averages(self) -> None:
        """Nothing to do: recipes with zero have no train.ema_decay."""

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        if weight.requires_grad:
            full: torch.Tensor = safe_get_full_fp32_param(weight)
            return full.detach()
        if self._stage < 3:
            return weight.detach()
        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()

    def write(self, weight: Any, value: torch.Tensor) -> None:  # noqa: ANN401  DeepSpeed's attributes
        if self._stage < 3:
            safe_set_full_fp32_param(weight, value)
        else:
            length = weight.ds_tensor.numel()
            begin = ranks.rank() * length
            self._put(weight, "weights", value.flatten()[begin : begin + length])
        if _is_whole(weight):
            weight.data.copy_(value.view_as(weight.data))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.network.named_parameters():
            yield name, self.read(weight)
        yield from buffers(self.network).items()


def _shape(weight: Any) -> torch.Size:  # noqa: ANN401  DeepSpeed's attributes
    """Return the shape of the whole weight, which may be sharded."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def _is_whole(weight: Any) -> bool:  # noqa: ANN401  DeepSpeed's attributes
    """Return whether every rank has the whole weight all the time: each in stages 1 and 2, small ones in stage 3."""
    return bool(weight.data.numel() == _shape(weight).numel())


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
