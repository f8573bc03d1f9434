"""Where a stream's shards are in the data, in a checkpoint: a tensor of whole numbers for each, beside the weights.

Any rank reads those alone that it goes on with, however many ranks wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from dray.train.shards import Reader, Shard, Shards, Tensors

_KIND = "feed."


def shards(states: list[Any] | None) -> Shards:
    """One tensor per stream shard: the part that it reads, documents taken of it, and tokens left over."""
    found = {}
    for number, part, taken, left in states or ():
        values = torch.from_numpy(np.concatenate([np.array([part, taken], np.int64), np.asarray(left, np.int64)]))
        found[f"{_KIND}{number}"] = Shard((len(values),), 0, values)
    return found


class Positions(Mapping[int, list[Any]]):
    """By a stream shard's number. Each is read when it is asked for, and no file stays open."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._folder = folder
        self._tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_KIND)}

    def __getitem__(self, number: int) -> list[Any]:
        name = f"{_KIND}{number}"
        values = torch.empty(self._tensors[name]["shape"], dtype=torch.int64) if name in self._tensors else None
        if values is None:
            raise KeyError(number)
        Reader(self._folder, self._tensors).fill({name: Shard(tuple(values.shape), 0, values)})
        part, taken, *_ = values.tolist()
        return [number, part, taken, values[2:].numpy()]

    def __iter__(self) -> Iterator[int]:
        return (int(name.removeprefix(_KIND)) for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def faults(tensors: Tensors) -> Iterator[str]:
    """The manifest's tensors that are named as positions but cannot be."""
    for name, tensor in tensors.items():
        shaped = tensor["dtype"] == "I64" and len(tensor["shape"]) == 1 and tensor["shape"][0] > 1
        if name.startswith(_KIND) and not (shaped and name.removeprefix(_KIND).isdecimal()):
            yield f"tensor {name} is not a position in the data"


def misfit(path: Path) -> str:
    """Why the positions in a file are invalid; empty if they are valid."""
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(_KIND)]  # noqa: SIM118  it is no dict
        wrong = any(bool((file.get_tensor(name) < 0).any()) for name in names)
    return f"{path.name} holds a negative position in the data" if wrong else ""


def is_scale(state: Any) -> bool:  # noqa: ANN401  any JSON value
    """Whether it is what a loss scale goes on from, or null."""
    match state:
        case None | [int() | float(), int(), int()]:
            return True
    return False
