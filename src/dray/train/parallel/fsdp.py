"""fsdp: each rank has a shard of weights, gradients and optimizer, by torch's FSDP2."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dray.contract.trainer import fsdp_nodes
from dray.train import ranks
from dray.train.collectives import all_gather_json
from dray.train.config import Config
from dray.train.errors import say
from dray.train.model.layers import layers as layers_of
from dray.train.objectives.base import LossModule
from dray.train.parallel.ddp import HALF, Ddp
from dray.train.parallel.replicated_checkpoint import Replicas

_GROUP_NUMEL = 1 << 24
"""Layers are grouped until they have this many weights, 32 MB in bf16, for each all-gather."""


class Layout(NamedTuple):
    """How fsdp shards a model; `_layout` tries layouts from the fastest to the one that needs least memory."""

    shard: int
    """How many ranks share one copy of the model."""
    sync_each_batch: bool
    """Whether gradients are summed over ranks in each micro-batch, or kept whole and summed in a step's last one."""
    reshard_after_forward: bool


class Fsdp(Ddp):
    """The fsdp strategy. The layout decides how long weights and gradients stay whole.

    The optimizer moves this rank's shards as plain tensors: as DTensors each operation costs the host milliseconds.
    """

    autocasts = False

    def _distributed(self, module: LossModule) -> torch.nn.Module:
        """Shard layer by layer, so that a rank never needs more than one whole layer beside its shards."""
        # All ranks take one layout, also where their GPUs differ.
        self._layout = layout = _layout(self.config, self.network, min(all_gather_json(_memory(self.device))))
        self._mesh = ranks.shard_mesh(self.device.type, layout.shard)
        self._shard_group = self._mesh.get_group("shard")
        replicas = self._mesh.get_group("replicate") if self._mesh.ndim > 1 else None
        self._replicas = Replicas(ranks.rank() // layout.shard, ranks.world() // layout.shard, replicas)
        policy = MixedPrecisionPolicy(param_dtype=HALF.get(self.config.train.precision), reduce_dtype=torch.float32)
        layers, tables = _groups(layers_of(self.network)), _tables(self.network)
        parts = [*layers, *([table] for table in tables), [self.network]]
        # The backward pass needs the last layers first, and no weights of the embeddings: do not reshard these.
        kept = [*layers[-1:], *parts[len(layers) :]]
        for part in parts:
            for tensor in (tensor for layer in part for tensor in (*layer.parameters(), *layer.buffers())):
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(self.device)
                    dist.broadcast(tensor.data, 0)
            reshards = layout.reshard_after_forward and part not in kept
            fully_shard(part, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshards)
        self._locals = {
            weight: torch.nn.Parameter(_local(weight.detach()), requires_grad=weight.requires_grad)
            for weight in self.network.parameters()
        }
        return module

    @torch.no_grad()
    def _gradients(self) -> list[torch.Tensor]:
        for weight in self._locals:
            self._optimized(weight).grad = None if weight.grad is None else _local(weight.grad)
        return super()._gradients()

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        square = super()._norm(gradients).square()
        dist.all_reduce(square, group=self._shard_group)
        return square.sqrt()

    def _drop_gradients(self) -> None:
        for weight, local in self._locals.items():
            weight.grad = local.grad = None

    @torch.no_grad()
    def _optimized(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        local = self._locals[weight]
        local.data = _local(weight)  # torch 2.9 moves uneven shards to other memory in the first forward pass
        return local

    def accumulate(self, *, sync: bool) -> AbstractContextManager[None]:
        root = self.network
        assert isinstance(root, FSDPModule)
        if not self._layout.sync_each_batch:
            root.set_requires_gradient_sync(sync)
        root.set_requires_all_reduce(sync)  # over shard groups
        if not self._layout.reshard_after_forward:
            root.set_reshard_after_backward(sync)
        return nullcontext()

    def _named_weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        self._reshard()
        return super()._named_weights()

    def use_averages(self) -> None:
        self._reshard()  # a layer that is whole would keep its weights, and compute with them
        super().use_averages()

    def _reshard(self) -> None:
        """Free the whole layers that a forward pass without a backward pass leaves behind."""
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _begin(self, weight: torch.nn.Parameter) -> int:
        """FSDP2 gives each rank the same number of rows; the last ranks get fewer, or none."""
        rows, width = weight.shape[0], math.prod(weight.shape[1:])
        each = -(-rows // self._layout.shard)
        return min(each * self._mesh.get_local_rank("shard"), rows) * width


def _layout(config: Config, network: torch.nn.Module, memory: float) -> Layout:
    """Return the fastest layout that the recipe allows and that fits; if none fits, the one that takes least."""
    train, local, nodes = config.train, ranks.local_world(), ranks.world() // ranks.local_world()
    weights = [weight for weight in network.parameters() if not isinstance(weight, DTensor)]
    trained = [weight for weight in weights if weight.requires_grad]
    half = 2 if train.precision != "fp32" else 4

    def size(layout: Layout) -> float:
        weight_bytes, trained_bytes = (sum(weight.nbytes for weight in some) for some in (weights, trained))
        sharded_bytes = weight_bytes + 3 * trained_bytes  # gradients and AdamW's averages
        if train.ema_decay:
            sharded_bytes += 4 * sum(weight.numel() for weight in trained)
        total = sharded_bytes / layout.shard
        if not layout.reshard_after_forward:
            total += half * sum(weight.numel() for weight in weights)
        if not layout.sync_each_batch:
            total += 4 * sum(weight.numel() for weight in trained)
        return total

    groups = [local * count for count in fsdp_nodes.nodes_of(train.fsdp_shard, nodes)]
    groups = [group for group in groups if group > 1] or [ranks.world()]  # one rank alone shards nothing
    syncs = [True] if config.gradient_accumulation_steps == 1 else [False, True]
    reshards = [train.reshard_after_forward] if isinstance(train.reshard_after_forward, bool) else [False, True]
    layouts = [Layout(*choice) for choice in product(groups, syncs, reshards)]
    fitting = [layout for layout in layouts if size(layout) <= fsdp_nodes.SHARE * memory]
    layout = (fitting or layouts[-1:])[0]
    when = "each micro-batch" if layout.sync_each_batch else "the last micro-batch"
    say(
        f"fsdp: shards over {fsdp_nodes.text(layout.shard, layout.shard // local, nodes)}, gradients summed in {when}, "
        f"reshard_after_forward {str(layout.reshard_after_forward).lower()}: "
        f"{size(layout) / 1e9:.2f} GB of {memory / 1e9:.1f} GB for weights, gradients and optimizer"
    )
    return layout


def _memory(device: torch.device) -> float:
    """Return the memory of this rank's GPU, or its share of the host's."""
    if device.type != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks.local_world()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _groups(layers: list[torch.nn.Module]) -> list[list[torch.nn.Module]]:
    """Group small consecutive layers: each group costs an all-gather and a reduce-scatter."""
    groups: list[list[torch.nn.Module]] = []
    size = _GROUP_NUMEL
    for layer in layers:
        if size >= _GROUP_NUMEL:
            groups.append([])
            size = 0
        groups[-1].append(layer)
        size += sum(weight.numel() for weight in layer.parameters())
    return groups


def _tables(network: Any) -> list[torch.nn.Module]:  # noqa: ANN401  a transformers model
    """Return embeddings and head unless they are tied: each is gathered by itself, not with the rest of the model."""
    embeddings, head = network.get_input_embeddings(), network.get_output_embeddings()
    if type(embeddings) is not torch.nn.Embedding or type(head) is not torch.nn.Linear:
        return []
    return [] if embeddings.weight is head.weight else [embeddings, head]


STRATEGY = Fsdp
