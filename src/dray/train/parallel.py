"""How one model is on many ranks. The loop asks for a loss, hands it back, and has the weights moved; no more.

ddp: each rank has all of it. fsdp: each has a part of weights, gradients and optimizer. zero1 to zero3: DeepSpeed's
stages, which part the optimizer, the gradients and the weights in turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dray.train.config import Config


class Parallel(Protocol):
    """What the loop, evaluation and checkpoints know of it."""

    device: torch.device
    network: torch.nn.Module

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """One forward pass."""

    def turn(self, *, last: bool) -> Any:  # noqa: ANN401  a context manager
        """Around one forward and backward pass; gradients are summed over ranks in a step's last one alone."""

    def backward(self, loss: torch.Tensor) -> None:
        """One backward pass; the loss is a mean over this pass's own tokens."""

    def update(self, rate: float) -> float:
        """Move the weights at this learning rate; the gradients' norm before they were clipped."""

    def save(self, folder: Path) -> None:
        """Weights and optimizer, all ranks together."""

    def load(self, folder: Path) -> None:
        """The same back again, on any number of ranks."""

    def weights(self) -> dict[str, Any]:
        """All weights, on the first rank."""


def begin(config: Config) -> torch.device:
    """Meet the other ranks; the device that is this one's."""
    on_cpu = config.variant == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    return device


def make(network: torch.nn.Module, config: Config, device: torch.device) -> Parallel:
    """As the recipe's train.strategy says."""
    if config.strategy.startswith("zero"):
        from dray.train.zero import Zero  # noqa: PLC0415  importing DeepSpeed takes a second

        return Zero(network, config, device)
    return Torch(network, config, device)


def adamw(network: torch.nn.Module, config: Config, *, fused: bool = True) -> torch.optim.Optimizer:
    """The one optimizer of all strategies."""
    return torch.optim.AdamW(network.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=fused)


class Torch:
    """ddp and fsdp."""

    def __init__(self, network: torch.nn.Module, config: Config, device: torch.device) -> None:
        self.device, self.config, self.network = device, config, network.to(device)
        self._half = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
        if config.strategy == "fsdp":
            self._module: Any = self._sharded()
        elif dist.get_world_size() > 1:
            ids = None if device.type == "cpu" else [device.index]
            self._module = DistributedDataParallel(self.network, device_ids=ids, gradient_as_bucket_view=True)
        else:
            self._module = self.network
        self._optimizer = adamw(self.network, config)

    def _sharded(self) -> torch.nn.Module:
        half = torch.bfloat16 if self.config.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for block in _blocks(self.network):
            fully_shard(block, mp_policy=policy)
        fully_shard(self.network, mp_policy=policy)
        return self.network

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        with self._half:
            found: torch.Tensor = self._module(input_ids=rows, use_cache=False).logits
        return found

    @contextmanager
    def turn(self, *, last: bool) -> Iterator[None]:
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(last)
            yield
        elif isinstance(self._module, DistributedDataParallel) and not last:
            with self._module.no_sync():
                yield
        else:
            yield

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss / self.config.accumulation)

    def update(self, rate: float) -> float:
        limit = self.config.clip if self.config.clip > 0 else float("inf")
        norm: Any = torch.nn.utils.clip_grad_norm_(self.network.parameters(), limit)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.network, self._optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.network, self._optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        load(state, checkpoint_id=folder)
        set_state_dict(
            self.network, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def weights(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.network, options=options)


def _blocks(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that repeat: the longest list of modules that the network has."""
    lists = [list(module) for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def mean(values: torch.Tensor) -> torch.Tensor:
    """Over all ranks."""
    dist.all_reduce(values)
    return values / dist.get_world_size()
