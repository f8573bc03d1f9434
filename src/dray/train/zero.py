"""DeepSpeed's ZeRO behind the same few words as ddp and fsdp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from dray.train.config import Config
from dray.train.objective import Batch, Objective
from dray.train.parallel import MOMENTS, State, adamw, buffers
from dray.train.scaler import Scaler, exhausted
from dray.train.stop import stop

_AT_ONCE = 16  # weights that are read from a checkpoint together


class Zero:
    """Stages 1, 2 and 3; `train.offload` puts the optimizer, or weights too, into the host's memory."""

    def __init__(self, objective: Objective, config: Config, device: torch.device) -> None:
        self.device, self.network, self._stage = device, objective.network, int(config.strategy.removeprefix("zero"))
        self.scaler = Scaler(config.loss_scale) if config.precision == "fp16" else None
        if self._stage == 3:  # weight by weight, so that no rank ever has the whole model
            deepspeed.zero.Init(module=self.network, config_dict_or_path=settings(config))
        else:
            self.network.to(device)
        for buffer in self.network.buffers():  # DeepSpeed copies weights to all ranks, and not these
            buffer.data = buffer.data.to(device)
            dist.broadcast(buffer.data, 0)
        optimizer = adamw(self.network, config, fused=False)
        try:
            self._engine: Any = deepspeed.initialize(model=objective, optimizer=optimizer, config=settings(config))[0]
        except (ValueError, AssertionError) as error:
            stop(
                "DeepSpeed refuses these settings",
                wanted="settings that DeepSpeed knows, and a precision that this device has",
                found=" ".join(str(error).split())[:400],
                fix="correct train.precision, or the file that train.deepspeed names",
            )
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
            optimizer.optimizer.state[flat] = {"step": torch.tensor(0.0), **moments}
        if self._stage < 3:
            optimizer._lazy_init_hp_params_optimizer_state()

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._engine(batch.rows, batch.targets, batch.positions)
        return found

    @contextmanager
    def turn(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self, rate: float) -> torch.Tensor:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        try:
            self._engine.step()
        except Exception as error:
            if self.scaler and "minimum" in str(error):  # DeepSpeed has no class for it
                exhausted(self.scaler.scale)
            raise
        if self.scaler:
            self.scaler.scale = float(self._engine.optimizer.cur_scale)
            self.scaler.skipped = int(self._engine.skipped_steps)
        return torch.as_tensor(self._engine.get_global_grad_norm() or 0.0, device=self.device)

    def state(self) -> State:
        """Whole tensors, brought together one by one; each rank keeps its share of them."""
        mine, count = dist.get_rank(), dist.get_world_size()
        others = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers(self.network).items()}
        found: State = {"weights": {}, **{moment: {} for moment in MOMENTS}, "others": others if mine == 0 else {}}
        for number, (name, weight) in enumerate(self._named):
            wholes = {"weights": safe_get_full_fp32_param(weight)}
            wholes |= {moment: safe_get_full_optimizer_state(weight, moment) for moment in MOMENTS}
            if number % count == mine:
                for kind, whole in wholes.items():
                    found[kind][name] = whole.detach().to("cpu", copy=True)
        return found

    def load(self, read: Callable[[State], None], updates: int) -> None:
        read({"others": buffers(self.network)})
        for begin in range(0, len(self._named), _AT_ONCE):
            some = self._named[begin : begin + _AT_ONCE]
            room = {name: getattr(weight, "ds_shape", weight.shape) for name, weight in some}
            state = {kind: {name: torch.empty(room[name]) for name in room} for kind in ("weights", *MOMENTS)}
            read(state)
            for name, weight in some:
                self._set(weight, {kind: tensors[name] for kind, tensors in state.items()})
        if self.scaler:
            self._engine.optimizer.cur_scale = self.scaler.scale
            self._engine.skipped_steps = self.scaler.skipped
        for state in self._engine.optimizer.optimizer.state.values():
            state["step"].fill_(float(updates))

    def _set(self, weight: Any, values: dict[str, torch.Tensor]) -> None:  # noqa: ANN401  a weight with DeepSpeed's names
        self.write(weight, values["weights"])
        for moment in MOMENTS:
            if self._stage < 3:
                safe_set_full_optimizer_state(weight, values[moment], moment)
            else:
                safe_set_local_optimizer_state(weight, _share(values[moment], weight.ds_tensor.numel()), moment)

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        whole: torch.Tensor = safe_get_full_fp32_param(weight) if self._stage == 3 else weight
        return whole.detach().float()

    def clamp(self, weight: Any, bound: torch.Tensor) -> None:  # noqa: ANN401  a weight with DeepSpeed's names
        if self._stage < 3:
            weight.data.clamp_(-bound, bound)
            mapping = weight._hp_mapping  # of the part that this rank moves, if any
            if mapping is not None:
                master, place = mapping.get_hp_fragment(), mapping.lp_fragment_address
                part = bound.expand_as(weight).flatten().narrow(0, place.start, place.numel).to(master.device)
                master.data.clamp_(-part, part)
            return
        mine = safe_get_local_fp32_param(weight)
        part = _share(bound.expand(weight.ds_shape), mine.numel()).to(mine.device)
        mine = mine.clamp(-part, part)
        safe_set_local_fp32_param(weight, mine)
        weight.ds_tensor.data.copy_(mine)
        if weight.data.numel() == weight.ds_numel:  # a small one, which is whole on every rank all the time
            weight.data.clamp_(-bound, bound)

    def write(self, weight: Any, value: torch.Tensor) -> None:  # noqa: ANN401  a weight with DeepSpeed's names
        if self._stage < 3:
            if weight.requires_grad:
                safe_set_full_fp32_param(weight, value)
            weight.data.copy_(value)
            return
        mine = _share(value, weight.ds_tensor.numel())
        if weight.requires_grad:
            safe_set_local_fp32_param(weight, mine)
        weight.ds_tensor.data.copy_(mine)
        if weight.data.numel() == weight.ds_numel:  # a small one, which is whole on every rank all the time
            weight.data.copy_(value.view_as(weight.data))

    def weights(self) -> dict[str, torch.Tensor]:
        first = dist.get_rank() == 0
        found = {name: buffer.cpu() for name, buffer in buffers(self.network).items()} if first else {}
        for name, weight in self.network.named_parameters():
            whole = safe_get_full_fp32_param(weight).detach() if weight.requires_grad else self._still(weight)
            if first:
                found[name] = whole.cpu()
        return found

    def _still(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """One that nobody moves, which has no other copy."""
        if self._stage < 3:
            return weight.detach()
        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()


def _share(whole: torch.Tensor, length: int) -> torch.Tensor:
    """This rank's part of the flattened tensor; the last one is filled up with zeros."""
    flat = whole.flatten()
    begin = dist.get_rank() * length
    part = flat[begin : begin + length]
    return torch.nn.functional.pad(part, (0, length - part.numel()))


def settings(config: Config) -> dict[str, Any]:
    """What DeepSpeed is told: the user's own file, and what the recipe decides over it."""
    place = {"device": "cpu", "pin_memory": config.variant != "cpu"}
    said = dict(config.deepspeed)
    stage = {**said.pop("zero_optimization", {}), "stage": int(config.strategy.removeprefix("zero"))}
    if config.offload:
        stage["offload_optimizer"] = {**place, **stage.get("offload_optimizer", {})}
    if config.offload == "all":
        stage["offload_param"] = {**place, **stage.get("offload_param", {})}
    fp16 = {
        **said.pop("fp16", {}),
        "initial_scale_power": round(math.log2(config.loss_scale)),
        "enabled": config.precision == "fp16",
    }
    if config.precision != "fp32":  # as ddp and fsdp do it: DeepSpeed would sum gradients in 16 bits
        said.setdefault("communication_data_type", "fp32")
        if stage["stage"] > 1:
            said.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return {
        **said,
        "train_micro_batch_size_per_gpu": config.per_device,
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": config.clip,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": fp16,
        "zero_optimization": stage,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW resumes to the last bit, DeepSpeed's does not
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }
