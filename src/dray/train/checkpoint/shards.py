"""The tensors of a checkpoint: which part of each a rank writes, and how any number of ranks reads them.

A shard is a range of numbers of the flattened tensor, with all strategies: DDP divides the numbers of all tensors
evenly over its ranks, FSDP shards rows, and ZeRO the flattened weights. So one reader serves all of them, on any number
of ranks. Names begin with the kind of tensor: `weights.NAME`, `others.NAME` for a buffer, `KEY.NAME` for the
optimizer's `state[weight][KEY]`, and `feed.NUMBER` for a stream's position in the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import _TYPES

from dray.contract.findings import DrayError
from dray.train.checkpoint import manifest

TYPES = cast(dict[str, torch.dtype], _TYPES)
"""torch's types by safetensors' names."""
_FEED = "feed."


class Shard(NamedTuple):
    """A range of a flattened tensor of this shape: its numbers from `begin` on are `values`."""

    shape: tuple[int, ...]
    begin: int
    values: torch.Tensor


Shards = dict[str, Shard]
"""Shards by kind and name, such as `weights.lm_head.weight`."""

Tensors = dict[str, dict[str, Any]]
"""A manifest's part about tensors, by the same names: `dtype`, `shape` and `shards`, a list of entries.

An entry `[file, begin, length, count]` means: the files `file` to `file + count - 1` hold `length` numbers each, the
first of them from `begin` on. So a tensor that many ranks share evenly has one or two entries.
"""


def file_of(rank: int) -> str:
    """Return the name of this rank's file."""
    return f"rank-{rank}.safetensors"


def whole_shards(kind: str, tensors: dict[str, torch.Tensor]) -> Shards:
    """Return shards that hold these tensors whole."""
    return {f"{kind}.{name}": Shard(tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()}


def divided(shards: Shards, rank: int, count: int) -> Shards:
    """Return the part of these shards for one of `count` ranks; all parts have the same size."""
    total = sum(shard.values.numel() for shard in shards.values())
    first, last = total * rank // count, total * (rank + 1) // count
    parts, at = {}, 0
    for name, shard in shards.items():
        low, high = max(first - at, 0), min(last - at, shard.values.numel())
        if low < high:
            parts[name] = Shard(shard.shape, shard.begin + low, shard.values.reshape(-1)[low:high])
        at += shard.values.numel()
    return parts


@contextmanager
def flattened(shards: Shards) -> Iterator[Shards]:
    """Yield the shards with flat values, to fill; tensors that are not contiguous get their values afterwards."""
    flat = {name: shard._replace(values=shard.values.detach().flatten()) for name, shard in shards.items()}
    yield flat
    for name, shard in shards.items():
        if not shard.values.is_contiguous():  # else the flat tensor is a view of it
            shard.values.detach().copy_(flat[name].values.view(shard.values.shape))


def join(part: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two parts of a manifest; an entry that continues the one before is merged with it."""
    tensors: Tensors = {**part["tensors"]}
    for name, tensor in other["tensors"].items():
        entries: list[list[int]] = []
        known = tensors[name]["shards"] if name in tensors else []
        for file, begin, length, count in sorted([*known, *tensor["shards"]], key=itemgetter(1)):
            last_file, last_begin, last_length, last_count = entries[-1] if entries else (0, 0, 0, 0)
            next_file, next_begin = last_file + last_count, last_begin + last_length * last_count
            if (file, begin, length) == (next_file, next_begin, last_length):
                entries[-1][3] += count
            else:
                entries.append([file, begin, length, count])
        tensors[name] = {**tensor, "shards": entries}
    return {"files": {**part["files"], **other["files"]}, "tensors": tensors}


class MismatchError(ValueError):
    """The checkpoint lacks one of these tensors, or has it with another shape."""


class Reader:
    """Fills shards from a verified checkpoint. It maps the files, and reads only what it needs."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder, self.tensors = folder, tensors
        self._files: dict[str, Any] = {}

    def fill(self, shards: Shards) -> None:
        """Fill these shards. It is no collective: a rank may call it alone."""
        self.require(shards)
        with flattened(shards) as flat:
            for name, shard in flat.items():
                self._copy(name, shard.begin, shard.values)

    def require(self, shards: Shards) -> None:
        """Raise MismatchError if the checkpoint does not have these tensors."""
        for name, shard in shards.items():
            saved = self.tensors.get(name)
            if saved is None and shard.values.numel():
                raise MismatchError(f"{name} is missing")
            if saved is not None and tuple(saved["shape"]) != shard.shape:
                raise MismatchError(f"{name} has the shape {saved['shape']}, not {list(shard.shape)}")

    def _copy(self, name: str, begin: int, values: torch.Tensor) -> None:
        """Fill `values` with the tensor's numbers from `begin` on."""
        end = begin + values.numel()
        entries = self.tensors[name]["shards"] if end > begin else []
        for file, entry_begin, length, count in entries:
            first, last = max((begin - entry_begin) // length, 0), min(-(-(end - entry_begin) // length), count)
            for number in range(first, last):  # of the entry's files, those that hold some of these numbers
                file_begin = entry_begin + number * length
                low, high = max(begin, file_begin), min(end, file_begin + length)
                saved = self._file(file_of(file + number)).get_tensor(name).flatten()
                values[low - begin : high - begin].copy_(saved[low - file_begin : high - file_begin])

    def _file(self, name: str) -> Any:  # noqa: ANN401  safetensors has no types
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, "pt")
        return self._files[name]


def open_checkpoint(path: Path) -> Reader:
    """Verify a checkpoint in this process alone, and return a reader of its tensors."""
    saved = manifest.read_checkpoint(path)
    if reasons := manifest.damage(path, saved):
        raise DrayError(
            "the checkpoint is incomplete",
            wanted="the files of its manifest",
            found=f"{'; '.join(reasons[:3])} in {path}",
            fix="use another checkpoint: --step",
        )
    return Reader(path, saved["tensors"])


def position_shards(states: list[Any] | None) -> Shards:
    """Return a tensor for each stream shard: its part of the dataset, the documents read of it, and unused tokens."""
    shards = {}
    for number, part, documents, rest in states or ():
        values = torch.from_numpy(np.concatenate([np.array([part, documents], np.int64), np.asarray(rest, np.int64)]))
        shards[f"{_FEED}{number}"] = Shard((len(values),), 0, values)
    return shards


class Positions(Mapping[int, list[Any]]):
    """The positions in the data by a stream shard's number; each is read from the file when it is needed."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._folder = folder
        self._tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_FEED)}

    def __getitem__(self, number: int) -> list[Any]:
        name = f"{_FEED}{number}"
        values = torch.empty(self._tensors[name]["shape"], dtype=torch.int64)
        Reader(self._folder, self._tensors).fill({name: Shard(tuple(values.shape), 0, values)})
        part, documents, *_ = values.tolist()
        return [number, part, documents, values[2:].numpy()]

    def __iter__(self) -> Iterator[int]:
        return (int(name.removeprefix(_FEED)) for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
