"""How one model is on many ranks: each has a copy (ddp), or each has a part of it (fsdp)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dray.train.config import Config


def begin(config: Config) -> torch.device:
    """Meet the other ranks; the device that is this one's."""
    on_cpu = config.variant == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    return device


class Parallel:
    """The model as ranks share it; the loop knows no other difference between the two."""

    def __init__(self, network: torch.nn.Module, config: Config, device: torch.device) -> None:
        self.device = device
        self.config = config
        self.network = network.to(device)
        self._half = torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
        if config.strategy == "fsdp":
            self.module: Any = self._sharded()
        elif dist.get_world_size() > 1:
            ids = None if device.type == "cpu" else [device.index]
            self.module = DistributedDataParallel(self.network, device_ids=ids, gradient_as_bucket_view=True)
        else:
            self.module = self.network

    def _sharded(self) -> torch.nn.Module:
        half = torch.bfloat16 if self.config.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for block in _blocks(self.network):
            fully_shard(block, mp_policy=policy)
        fully_shard(self.network, mp_policy=policy)
        return self.network

    @contextmanager
    def pass_(self, *, last: bool) -> Iterator[None]:
        """One backward pass; gradients are summed over ranks in the last one of a step alone."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            yield
        elif isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync(), self._half:
                yield
        else:
            with self._half:
                yield

    def clip(self, norm: float) -> float:
        """Scale the gradients down to that norm; the norm that they had."""
        found: Any = torch.nn.utils.clip_grad_norm_(self.network.parameters(), norm if norm > 0 else float("inf"))
        return float(found.full_tensor() if hasattr(found, "full_tensor") else found)


def _blocks(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that repeat: the longest list of modules that the network has."""
    lists = [list(module) for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def mean(values: torch.Tensor) -> torch.Tensor:
    """Over all ranks."""
    dist.all_reduce(values)
    return values / dist.get_world_size()
