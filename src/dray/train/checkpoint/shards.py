"""The tensors of a checkpoint: which part of each a rank writes, and how any number of ranks reads them.

A shard is a row of numbers of the flattened tensor, whatever the strategy: DDP divides all tensors evenly over its
ranks, FSDP shards rows and ZeRO the flattened weights. So one reader serves all of them, on any number of ranks. The
names say what a tensor is: `weights.NAME`, `others.NAME` for a buffer, `KEY.NAME` for what the optimizer has as
`state[weight][KEY]`, and `feed.NUMBER` for a stream's position in the data.
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
"""By the names that safetensors has for them."""
_FEED = "feed."


class Shard(NamedTuple):
    """`values` are numbers of a tensor of this shape, flattened: those from `begin` on."""

    shape: tuple[int, ...]
    begin: int
    values: torch.Tensor


Shards = dict[str, Shard]
"""Shards by kind and name, such as `weights.lm_head.weight`."""

Tensors = dict[str, dict[str, Any]]
"""JSON, by the same names: `dtype`, `shape` and, by where they begin, `shards` as rows `[file, begin, length, count]`.

`count` files from that number on have so many numbers of the tensor each, one after the other. So a tensor that each of
many ranks has a share of has a row or two, whatever their number.
"""


def file_of(rank: int) -> str:
    """The name of this rank's file."""
    return f"rank-{rank}.safetensors"


def whole_shards(kind: str, tensors: dict[str, torch.Tensor]) -> Shards:
    """Shards that hold these tensors whole."""
    return {f"{kind}.{name}": Shard(tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()}


def divided(shards: Shards, rank: int, count: int) -> Shards:
    """An equal part of these numbers for one of `count` ranks that all have the same."""
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
    """Yield flat views; afterwards copy back the tensors that are not contiguous."""
    rows = {name: shard._replace(values=shard.values.detach().flatten()) for name, shard in shards.items()}
    yield rows
    for name, shard in shards.items():
        if not shard.values.is_contiguous():  # else the row is the tensor's own memory
            shard.values.detach().copy_(rows[name].values.view(shard.values.shape))


def join(part: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two parts of a manifest; rows that continue in the next files become one row."""
    tensors: Tensors = {**part["tensors"]}
    for name, tensor in other["tensors"].items():
        rows: list[list[int]] = []
        known = tensors[name]["shards"] if name in tensors else []
        for file, begin, length, count in sorted([*known, *tensor["shards"]], key=itemgetter(1)):
            first, start, each, many = rows[-1] if rows else (0, 0, 0, 0)
            if (file, begin, length) == (first + many, start + each * many, each):
                rows[-1][3] += count
            else:
                rows.append([file, begin, length, count])
        tensors[name] = {**tensor, "shards": rows}
    return {"files": {**part["files"], **other["files"]}, "tensors": tensors}


class MismatchError(ValueError):
    """The checkpoint is not of these tensors."""


class Reader:
    """Fills shards from a checkpoint that has been verified. Files are mapped: no more is read than needed."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder, self.tensors = folder, tensors
        self._files: dict[str, Any] = {}

    def fill(self, shards: Shards) -> None:
        """Read these shards. No collective: ranks may call it alone."""
        self.require(shards)
        with flattened(shards) as rows:
            for name, shard in rows.items():
                self._copy(name, shard.begin, shard.values)

    def require(self, shards: Shards) -> None:
        """Fail if the checkpoint's tensors differ from these."""
        for name, shard in shards.items():
            saved = self.tensors.get(name)
            if saved is None and shard.values.numel():
                raise MismatchError(f"{name} is missing")
            if saved is not None and tuple(saved["shape"]) != shard.shape:
                raise MismatchError(f"{name} has the shape {saved['shape']}, not {list(shard.shape)}")

    def _copy(self, name: str, begin: int, values: torch.Tensor) -> None:
        end = begin + values.numel()
        rows = self.tensors[name]["shards"] if end > begin else []
        for file, start, length, count in rows:
            for place in range(max((begin - start) // length, 0), min(-(-(end - start) // length), count)):
                first = start + place * length
                low, high = max(begin, first), min(end, first + length)
                part = self._file(file_of(file + place)).get_tensor(name).flatten()[low - first : high - first]
                values[low - begin : high - begin].copy_(part)

    def _file(self, name: str) -> Any:  # noqa: ANN401  safetensors has no types
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, "pt")
        return self._files[name]


def open_checkpoint(path: Path) -> Reader:
    """The tensors of a checkpoint, which is verified here and not by the run's ranks."""
    about = manifest.read_checkpoint(path)
    if reasons := manifest.damage(path, about):
        raise DrayError(
            "the checkpoint is incomplete",
            wanted="the files of its manifest",
            found=f"{'; '.join(reasons[:3])} in {path}",
            fix="use another checkpoint: --step",
        )
    return Reader(path, about["tensors"])


def position_shards(states: list[Any] | None) -> Shards:
    """One tensor per stream shard: the part that it reads, documents taken of it, and tokens left over."""
    shards = {}
    for number, part, taken, left in states or ():
        values = torch.from_numpy(np.concatenate([np.array([part, taken], np.int64), np.asarray(left, np.int64)]))
        shards[f"{_FEED}{number}"] = Shard((len(values),), 0, values)
    return shards


class Positions(Mapping[int, list[Any]]):
    """The positions in the data by a stream shard's number, each read when it is asked for."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._folder = folder
        self._tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_FEED)}

    def __getitem__(self, number: int) -> list[Any]:
        name = f"{_FEED}{number}"
        values = torch.empty(self._tensors[name]["shape"], dtype=torch.int64)
        Reader(self._folder, self._tensors).fill({name: Shard(tuple(values.shape), 0, values)})
        part, taken, *_ = values.tolist()
        return [number, part, taken, values[2:].numpy()]

    def __iter__(self) -> Iterator[int]:
        return (int(name.removeprefix(_FEED)) for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
