"""fsdp: each rank has a shard of weights, gradients and optimizer, by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dray.train.objectives.base import LossModule
from dray.train.strategies.base import State
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

    def _share(self) -> State:
        return self._tensors()

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after an evaluation some are whole still
        return super()._named()


def _layers(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that repeat: the longest list of modules that the network has."""
    lists = [list(module) for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


STRATEGY = Fsdp
