"""The tensors of a checkpoint: which numbers of which tensor a rank has, and how any other ranks read them again.

A shard is a row of numbers of the flattened tensor, whatever the strategy: DDP divides all tensors evenly over its
ranks, FSDP shards rows and ZeRO the flattened weights. So one reader serves all of them, on any number of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from dray.train.manifest import natural

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TYPES = {name: dtype for dtype, name in _NAMES.items()}
"""By the names that safetensors has for them."""


class Shard(NamedTuple):
    """`values` are numbers of a tensor of this shape, flattened: those from `begin` on."""

    shape: tuple[int, ...]
    begin: int
    values: torch.Tensor


Shards = dict[str, Shard]
"""By kind and name, such as `weights.lm_head.weight`."""


def whole(kind: str, tensors: dict[str, torch.Tensor]) -> Shards:
    """All numbers of each."""
    return {f"{kind}.{name}": Shard(tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()}


def divided(shards: Shards, rank: int, count: int) -> Shards:
    """What one of `count` ranks writes where each has all: as many numbers as any other."""
    total = sum(shard.values.numel() for shard in shards.values())
    first, last = total * rank // count, total * (rank + 1) // count
    found, at = {}, 0
    for name, shard in shards.items():
        low, high = max(first - at, 0), min(last - at, shard.values.numel())
        if low < high:
            found[name] = Shard(shard.shape, shard.begin + low, shard.values.reshape(-1)[low:high])
        at += shard.values.numel()
    return found


class Staged(NamedTuple):
    """A safetensors file in memory: its head, and the numbers once `wait` has returned."""

    head: bytes
    numbers: memoryview
    tensors: dict[str, list[Any]]
    """Of each shard the type, the tensor's shape, where it begins and how long it is; JSON."""
    sources: Shards  # until they are copied
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the numbers are there; for a thread that is not training."""
        if self.copied is not None:
            self.copied.synchronize()
        self.sources.clear()


class Staging:
    """One buffer in the host's memory for all checkpoints of a run.

    Beside a GPU it is pinned, and filled on a stream of its own: training waits for it on the GPU alone, and no sooner
    than it would overwrite what is being copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def fill(self, shards: Shards) -> Staged:
        """Begin to copy; the buffer is in use until the caller is done with what this returns."""
        # The widest types first, so that each number lies where its type may lie.
        order = sorted((-shard.values.itemsize, name) for name, shard in shards.items() if shard.values.numel())
        rows = [(name, shards[name]) for _, name in order]
        size = sum(shard.values.nbytes for _, shard in rows)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        head, tensors, at = {}, {}, 0
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name, (shape, begin, values) in rows:
                end, length = at + values.nbytes, values.numel()
                self._buffer[at:end].view(values.dtype).copy_(values.detach().reshape(-1), non_blocking=True)
                dtype = _NAMES[values.dtype]
                own = list(shape) if length == math.prod(shape) else [length]
                head[name] = {"dtype": dtype, "shape": own, "data_offsets": [at, end]}
                tensors[name] = [dtype, list(shape), begin, length]
                at = end
        if self._stream is not None:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        text = json.dumps(head).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        data: Any = self._buffer.numpy()  # numpy's arrays are buffers, and its types do not say so
        return Staged(
            len(text).to_bytes(8, "little") + text, memoryview(data)[:size], tensors, dict(rows), self._copied
        )

    def fence(self) -> None:
        """What the GPU is told to do from now on, it does after the copies; this process does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


def joined(ranks: list[dict[str, list[Any]]], files: list[str]) -> dict[str, Any]:
    """The tensors of a manifest, from what each rank has staged into its file."""
    found: dict[str, Any] = {}
    for file, tensors in zip(files, ranks, strict=True):
        for name, (dtype, shape, begin, length) in tensors.items():
            one = found.setdefault(name, {"dtype": dtype, "shape": shape, "shards": []})
            one["shards"].append([file, begin, length])
    for one in found.values():
        one["shards"].sort(key=lambda shard: shard[1])
    return found


def faults(tensors: Any, files: dict[str, Any]) -> Iterator[str]:  # noqa: ANN401  JSON that anybody may have written
    """Why these are no whole tensors in those files."""
    if not isinstance(tensors, dict):
        yield "its manifest names no tensors"
        return
    for name, tensor in tensors.items():
        match tensor:
            case {"dtype": str(dtype), "shape": [*shape], "shards": [*shards]} if dtype in TYPES and all(
                map(natural, shape)
            ):
                fault = _fault(math.prod(shape), TYPES[dtype].itemsize, shards, files)
            case _:
                fault = "has no type, shape and shards"
        if fault:
            yield f"tensor {name} {fault}"


def _fault(size: int, width: int, shards: list[Any], files: dict[str, Any]) -> str:
    end, seen = 0, set()
    for shard in shards:
        match shard:
            case [str(file), int(begin), int(length)] if natural(begin) and natural(length) and length:
                pass
            case _:
                return "has a shard that is no file, offset and length"
        if file not in files or not file.endswith(".safetensors"):
            return f"is in {file[:80]!r}, which is no file of this checkpoint"
        if file in seen or length * width > files[file]["bytes"]:
            return f"has more numbers than {file}"
        if begin != end:
            return f"{'lacks numbers' if begin > end else 'has numbers twice'}: {min(begin, end)} to {max(begin, end)}"
        seen.add(file)
        end = begin + length
    return "" if end == size else f"has {end} numbers in its shards, and {size} by its shape"


def misfit(path: Path, tensors: dict[str, Any]) -> str:
    """What the file holds otherwise than the manifest says; empty where it agrees."""
    wanted = {
        name: (tensor["dtype"], length)
        for name, tensor in tensors.items()
        for file, _, length in tensor["shards"]
        if file == path.name
    }
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        found = {name: (part.get_dtype(), math.prod(part.get_shape())) for name, part in slices.items()}
    return "" if found == wanted else f"{path.name} holds other tensors than the manifest says"


class MismatchError(ValueError):
    """The checkpoint is not of these tensors."""


class Reader:
    """Fills shards from a checkpoint whose manifest has been checked. Files are mapped: no more is read than needed."""

    def __init__(self, folder: Path, tensors: dict[str, Any]) -> None:
        self.folder, self.tensors = folder, tensors
        self._files: dict[str, Any] = {}

    def fill(self, shards: Shards) -> None:
        """Each rank plans for itself what it reads from where."""
        for name, shard in shards.items():
            if not shard.values.numel():
                continue
            saved = self.tensors.get(name)
            if saved is None:
                raise MismatchError(f"{name} is missing")
            if tuple(saved["shape"]) != shard.shape:
                raise MismatchError(f"{name} has the shape {saved['shape']}, and not {list(shard.shape)}")
            values = shard.values.detach()
            flat = values.view(-1) if values.is_contiguous() else values.flatten()
            self._copy(name, saved["shards"], shard.begin, flat)
            if not values.is_contiguous():
                values.copy_(flat.view(values.shape))

    def _copy(self, name: str, shards: list[Any], begin: int, flat: torch.Tensor) -> None:
        end = begin + flat.numel()
        for file, first, length in shards:
            low, high = max(begin, first), min(end, first + length)
            if low < high:
                part = self._file(file).get_tensor(name).flatten()[low - first : high - first]
                flat[low - begin : high - begin].copy_(part)

    def _file(self, name: str) -> Any:  # noqa: ANN401  safetensors has no types
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, "pt")
        return self._files[name]
