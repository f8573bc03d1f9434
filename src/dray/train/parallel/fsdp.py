"""fsdp: each rank has a shard of weights, gradients and optimizer, by torch's FSDP2."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dray.contract import fsdp_nodes
from dray.train.checkpoint.shards import Shard, Shards
from dray.train.collectives import all_gather_json
from dray.train.config import Config
from dray.train.errors import say
from dray.train.model.layers import layers as layers_of
from dray.train.objectives.base import LossModule
from dray.train.parallel.ddp import HALF, Ddp
from dray.train.parallel.replicas import Replicas

_GROUP = 1 << 24
"""Numbers that are gathered at once at least: 32 MB in 16 bits."""


class Layout(NamedTuple):
    """How fsdp shards a model; dray tries layouts from the fastest to the one that needs least memory."""

    shard: int
    """How many ranks share one copy of the model."""
    sync_each_batch: bool
    reshard_after_forward: bool


class Fsdp(Ddp):
    """The fsdp strategy. The layout decides how long weights and gradients stay whole.

    The optimizer moves this rank's shards as plain tensors: as DTensors each operation costs the host milliseconds.
    """

    autocasts = False

    def _distributed(self, module: LossModule) -> torch.nn.Module:
        """Layer by layer, so that no rank has to have more than one whole layer beside its shards."""
        world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = min(all_gather_json(_memory(self.device, local)))  # one layout for all, where GPUs differ
        self._layout = layout = _layout(self.config, self.network, memory, world, local)
        names, shape = ("replicate", "shard"), (world // layout.shard, layout.shard)
        whole = layout.shard == world  # nobody has a copy
        mesh = init_device_mesh(self.device.type, shape[whole:], mesh_dim_names=names[whole:])
        self._copies = None if whole else mesh.get_group("replicate")
        policy = MixedPrecisionPolicy(param_dtype=HALF.get(self.config.train.precision), reduce_dtype=torch.float32)
        layers, tables = [*_groups(layers_of(self.network))], _tables(self.network)
        parts = [*layers, *([table] for table in tables), [self.network]]
        # What is computed last is needed at once for its backward pass; the embeddings' needs no weights.
        kept = [*layers[-1:], *parts[len(layers) :]]
        for part in parts:
            for tensor in (tensor for layer in part for tensor in (*layer.parameters(), *layer.buffers())):
                if not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(self.device)
                    dist.broadcast(tensor.data, 0)
            again = layout.reshard_after_forward and part not in kept
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        _prefetch([cast(FSDPModule, layer[0]) for layer in layers], self.config.train.fsdp_prefetch)
        self._mesh = mesh
        self._locals = {
            weight: torch.nn.Parameter(_local(weight.detach()), requires_grad=weight.requires_grad)
            for weight in self.network.parameters()
        }
        return module

    @torch.no_grad()
    def _gradients(self) -> list[torch.Tensor]:
        for weight in self._locals:
            self._moved(weight).grad = None if weight.grad is None else _local(weight.grad)
        return super()._gradients()

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        square = super()._norm(gradients).square()
        dist.all_reduce(square, group=self._mesh.get_group(self._mesh.ndim - 1))
        return square.sqrt()

    def _drop_gradients(self) -> None:
        for weight, local in self._locals.items():
            weight.grad = local.grad = None

    @torch.no_grad()
    def _moved(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        local = self._locals[weight]
        local.data = _local(weight)  # torch 2.9 moves uneven shards to other memory in the first forward pass
        return local

    @contextmanager
    def accumulate(self, *, sync: bool) -> Iterator[None]:
        root = self.network
        assert isinstance(root, FSDPModule)
        if not self._layout.sync_each_batch:
            root.set_requires_gradient_sync(sync)
        root.set_requires_all_reduce(sync)  # over nodes, where each has a copy
        if not self._layout.reshard_after_forward:
            root.set_reshard_after_backward(sync)
        yield

    def _held(self) -> Iterator[tuple[Shards, Replicas]]:
        """Its shards, which other nodes may have too, and the buffers, which every rank has."""
        found, rank, world = self._shards(), dist.get_rank(), dist.get_world_size()
        others = {name: found.pop(name) for name in list(found) if name.startswith("others.")}
        shard = self._layout.shard
        yield found, Replicas(rank // shard, world // shard, self._copies)
        yield others, Replicas(rank, world)

    def _shards(self) -> Shards:
        weights = dict(self._named())
        return {
            f"{kind}.{name}": _shard(weights.get(name, tensor), tensor)
            for kind, named in self._tensors().items()
            for name, tensor in named.items()
        }

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after an evaluation some are whole still
        return super()._named()


def _layout(config: Config, network: torch.nn.Module, memory: float, world: int, local: int) -> Layout:
    """The fastest of those that the recipe allows and that fit; else the one that takes least."""
    train, nodes = config.train, world // local
    weights = [weight for weight in network.parameters() if not isinstance(weight, DTensor)]
    trained = [weight for weight in weights if weight.requires_grad]
    half = 2 if train.precision != "fp32" else 4

    def size(layout: Layout) -> float:
        found = (sum(weight.nbytes for weight in weights) + 3 * sum(weight.nbytes for weight in trained)) / layout.shard
        if not layout.reshard_after_forward:
            found += half * sum(weight.numel() for weight in weights)
        return found if layout.sync_each_batch else found + 4 * sum(weight.numel() for weight in trained)

    def allowed(asked: str | bool, *choices: bool) -> tuple[bool, ...]:
        return (asked,) if isinstance(asked, bool) else choices

    shards = [local * count for count in fsdp_nodes.nodes_of(train.fsdp_shard, nodes)]
    once = config.gradient_accumulation_steps == 1  # then there is nothing to keep
    layouts = [
        Layout(*one)
        for one in product(
            [one for one in shards if one > 1] or [world],  # one rank alone has nobody to share with
            (True,) if once else allowed(train.sync_each_batch, False, True),
            allowed(train.reshard_after_forward, False, True),
        )
    ]
    found = next((one for one in layouts if size(one) <= fsdp_nodes.SHARE * memory), layouts[-1])
    say(
        f"fsdp: shards over {fsdp_nodes.text(found.shard, found.shard // local, nodes)}, sync_each_batch "
        f"{str(found.sync_each_batch).lower()}, reshard_after_forward {str(found.reshard_after_forward).lower()}: "
        f"{size(found) / 1e9:.2f} GB of {memory / 1e9:.1f} GB for weights, gradients and optimizer"
    )
    return found


def _memory(device: torch.device, local: int) -> float:
    """Of this rank: its GPU's, or its share of the host's."""
    if device.type != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local


def _prefetch(layers: list[FSDPModule], ahead: int) -> None:
    for place, layer in enumerate(layers if ahead else ()):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(place - ahead, 0) : place][::-1])


def _shard(whole: torch.Tensor, local: torch.Tensor) -> Shard:
    """FSDP2 gives each rank as many rows as any other, and the last ones what is left."""
    shape = tuple(whole.shape)
    if not isinstance(whole, DTensor):
        return Shard(shape, 0, local)
    mesh, width = whole.device_mesh, math.prod(shape[1:])
    each = -(-shape[0] // mesh.size(mesh.ndim - 1))
    return Shard(shape, min(each * mesh.get_local_rank(mesh.ndim - 1), shape[0]) * width, local)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _groups(layers: list[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """Layers that follow one another: small ones together, as each group costs the host and the network a round."""
    group: list[torch.nn.Module] = []
    size = 0
    for layer in layers:
        group.append(layer)
        size += sum(weight.numel() for weight in layer.parameters())
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _tables(network: Any) -> list[torch.nn.Module]:  # noqa: ANN401  a transformers model
    """Embeddings and head where they are two: each is gathered by itself, and not as one group with all the rest."""
    embeddings, head = network.get_input_embeddings(), network.get_output_embeddings()
    if type(embeddings) is not torch.nn.Embedding or type(head) is not torch.nn.Linear:
        return []
    return [] if embeddings.weight is head.weight else [embeddings, head]


STRATEGY = Fsdp
