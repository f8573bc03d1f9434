"""fsdp: each rank has a shard of weights, gradients and optimizer, by torch's FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dray.train.objectives.base import LossModule
from dray.train.shards import Shard, Shards, divided
from dray.train.strategies.ddp import HALF, Ddp


class Fsdp(Ddp):
    """It reduces gradients in each micro-batch: else each rank would hold the whole gradient."""

    def _distributed(self, module: LossModule) -> torch.nn.Module:
        """Layer by layer, so that no rank ever has more than one whole layer beside its shards."""
        policy = MixedPrecisionPolicy(param_dtype=HALF.get(self.config.train.precision), reduce_dtype=torch.float32)
        for part in (*_layers(self.network), self.network):
            for tensor in (*part.parameters(), *part.buffers()):
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(self.device)
                    dist.broadcast(tensor.data, 0)
            fully_shard(part, mp_policy=policy)
        return module

    def state(self) -> Shards:
        """Its shards, and a part of the buffers, which every rank has."""
        found = self._shards()
        others = {name: found.pop(name) for name in list(found) if name.startswith("others.")}
        return {**found, **divided(others, dist.get_rank(), dist.get_world_size())}

    def _shards(self) -> Shards:
        found = self._tensors()
        return {f"{kind}.{name}": _shard(tensor) for kind, named in found.items() for name, tensor in named.items()}

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after an evaluation some are whole still
        return super()._named()


def _shard(tensor: torch.Tensor) -> Shard:
    """FSDP2 gives each rank as many rows as any other, and the last ones what is left."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Shard(shape, 0, tensor)
    each, width = -(-shape[0] // tensor.device_mesh.size()), math.prod(shape[1:])
    return Shard(shape, min(each * tensor.device_mesh.get_local_rank(), shape[0]) * width, tensor.to_local())


def _layers(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that repeat: the longest list of modules that the network has."""
    lists = [list(module) for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


STRATEGY = Fsdp
