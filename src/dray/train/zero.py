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
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
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

_TOGETHER = 1 << 24  # numbers that are summed over ranks in one go
_READ = 1 << 26  # weights that are read from a checkpoint in one go, each with its two averages


class Zero:
    """Stages 1, 2 and 3; `train.offload` puts the optimizer, or weights too, into the host's memory."""

    def __init__(self, objective: Objective, config: Config, device: torch.device) -> None:
        self.device, self.network, self._stage = device, objective.network, int(config.strategy.removeprefix("zero"))
        self.scaler = Scaler(config.initial_loss_scale) if config.precision == "fp16" else None
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
        others = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers(self.network).items()}
        found = self._gathered(("weights", *MOMENTS), dist.get_world_size())
        return {**found, "others": others if dist.get_rank() == 0 else {}}

    def _gathered(self, kinds: tuple[str, ...], owners: int) -> State:
        """Whole tensors, brought together many at a time, each at one of the first ranks alone."""
        found: State = {kind: {} for kind in kinds}
        wanted = [(kind, name, weight) for name, weight in self._named for kind in kinds]
        limit = min(_TOGETHER, -(-sum(_shape(weight).numel() for *_, weight in wanted) // owners))
        for number, some in enumerate(_heaps(wanted, limit)):
            sizes = [_shape(weight).numel() for *_, weight in some]
            heap = torch.zeros(sum(sizes), device=self.device)
            places = torch.split(heap, sizes)
            for (kind, _, weight), place in zip(some, places, strict=True):
                start, mine = self._mine(weight, kind)
                place[start : start + mine.numel()].copy_(mine[: max(place.numel() - start, 0)])
            dist.reduce(heap, number % owners)
            if dist.get_rank() == number % owners:
                for (kind, name, weight), place in zip(some, places, strict=True):
                    found[kind][name] = place.view(_shape(weight)).to("cpu", copy=True)
        return found

    def _mine(self, weight: Any, kind: str) -> tuple[int, torch.Tensor]:  # noqa: ANN401  a weight with DeepSpeed's names
        """Where this rank's part begins in the flattened tensor, and the part; the last may go beyond the end."""
        if self._stage < 3:
            part = weight._hp_mapping
            if part is None:
                return 0, torch.empty(0)
            return part.lp_fragment_address.start, part.get_hp_fragment(None if kind == "weights" else kind).data
        found = safe_get_local_fp32_param(weight) if kind == "weights" else safe_get_local_optimizer_state(weight, kind)
        mine: torch.Tensor = found.detach().flatten()
        return dist.get_rank() * mine.numel(), mine

    def load(self, read: Callable[[State], None], updates: int) -> None:
        read({"others": buffers(self.network)})
        for some in _heaps(self._named, _READ):
            room = {name: _shape(weight) for name, weight in some}
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
        start, mine = self._mine(weight, "weights")
        limit, end = bound.flatten().to(mine.device), mine.numel()
        if limit.numel() > 1:  # one for each row
            limit = limit[:, None].expand(_shape(weight)).flatten()[start : start + end]
            end = limit.numel()
        mine[:end].clamp_(-limit, limit)
        if self._stage == 3:
            safe_set_local_fp32_param(weight, mine)
            weight.ds_tensor.data.copy_(mine)
        if weight.data.numel() == _shape(weight).numel():  # else it is whole on no rank now
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
        found = self._gathered(("weights",), 1)["weights"]
        first = dist.get_rank() == 0
        for name, weight in self.network.named_parameters():
            still = None if weight.requires_grad else self._still(weight)
            if first and still is not None:
                found[name] = still.cpu()
        return {**found, **{name: buffer.cpu() for name, buffer in buffers(self.network).items()}} if first else {}

    def _still(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """One that nobody moves, which has no other copy."""
        if self._stage < 3:
            return weight.detach()
        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()


def _shape(weight: Any) -> torch.Size:  # noqa: ANN401  a weight with DeepSpeed's names
    """Of the whole, which may be parted."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def _heaps(wanted: list[Any], limit: int) -> Iterator[list[Any]]:
    """Tuples that end with a weight: as many together as have so many numbers, and one at least."""
    heap: list[Any] = []
    size = 0
    for one in wanted:
        if heap and size + _shape(one[-1]).numel() > limit:
            yield heap
            heap, size = [], 0
        heap.append(one)
        size += _shape(one[-1]).numel()
    if heap:
        yield heap


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
        "initial_scale_power": round(math.log2(config.initial_loss_scale)),
        "enabled": config.precision == "fp16",
    }
    if config.precision != "fp32":  # as ddp and fsdp do it: DeepSpeed would sum gradients in 16 bits
        said.setdefault("communication_data_type", "fp32")
        if stage["stage"] > 1:
            said.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return {
        **said,
        "train_micro_batch_size_per_gpu": config.per_device,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": fp16,
        "zero_optimization": stage,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW resumes to the last bit, DeepSpeed's does not
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
    }
