"""Folders of torch's DCP: of a user's script, and of Trainer with FSDP."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from dray.train.importing.pickles import INDEX, Distributed
from dray.train.importing.source import Adam, Source, Tensors, checked, damaged, file, names, natural, reading

_OF_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def folders(path: Path, found: set[str]) -> list[Path]:
    """The folders that DCP wrote: this one, or the two of accelerate's FSDP."""
    if INDEX in found:
        return [path]
    return [path / name for name in _OF_ACCELERATE if name in found and INDEX in names(path / name)]


def read(parts: list[Path]) -> Source:
    """Its tensors by the names that the script gave them."""
    tensors = checked({name: one for part in parts for name, one in _read(part).items()}, parts[0])
    ends = tuple(f".{kind}" for kind in (*_MOMENTS, "step"))
    states = {name: one for name, one in tensors.items() if name.endswith(ends)}
    weights = {name: one for name, one in tensors.items() if name not in states}
    if any(name.endswith(ends[:2]) for name in states):
        return Source("torch's DCP", parts[0], weights, None, partial(_adam, states, parts[-1]))
    return Source("torch's DCP", parts[0], weights)


def _read(folder: Path) -> Tensors:
    own = {name for name in names(folder) if name.endswith(".distcp")}
    for name in (*own, INDEX):
        file(folder, name)
    with reading(folder):
        tensors = Distributed(folder, own)
        return {name: tensors.read(name) for name in tensors}


def _adam(states: Tensors, folder: Path, network: torch.nn.Module) -> Adam:
    """What `get_state_dict` of torch names: `optimizer.state.NAME.exp_avg`."""
    found: dict[str, Tensors] = {kind: {} for kind in (*_MOMENTS, "step")}
    for kind, tensors in found.items():
        for name, _ in network.named_parameters():
            ours = [key for key in states if key == f"{name}.{kind}" or key.endswith(f".{name}.{kind}")]
            if len(ours) != 1:
                raise damaged(folder, f"{len(ours)} tensors are the {kind} of {name}")
            tensors[name] = states[ours[0]]
    updates = {natural(one, folder, "step") for one in found.pop("step").values()}
    if len(updates) != 1:
        raise damaged(folder, f"weights with different numbers of updates: {sorted(updates)[:4]}")
    return Adam(updates.pop(), found, {})
