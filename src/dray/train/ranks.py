"""This process's place among the ranks of the run. Other modules ask here, not torch.distributed.

Every strategy divides the batch over all ranks, so each rank reads its own part of the data. fsdp also divides
the model, over the ranks of a shard group.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def rank() -> int:
    """Return this rank's number, which the launcher sets before the ranks connect."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return this rank's number on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world() -> int:
    """Return the number of ranks on each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def shard_mesh(device_type: str, group_size: int) -> DeviceMesh:
    """Return the mesh whose shard groups have `group_size` consecutive ranks each.

    Its dimension `shard` has the ranks that share one copy of the model; `replicate` has those with the same shard.
    """
    if group_size == world():
        return init_device_mesh(device_type, (group_size,), mesh_dim_names=("shard",))
    shape = (world() // group_size, group_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
