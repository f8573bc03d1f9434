"""The tensors of a checkpoint: which part of each a rank writes, and how any number of ranks reads them.

A shard is a row of numbers of the flattened tensor, whatever the strategy: DDP divides all tensors evenly over its
ranks, FSDP shards rows and ZeRO the flattened weights. So one reader serves all of them, on any number of ranks.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from dray.train.checkpoint.manifest import natural
from dray.train.errors import say

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

_PAGE = 4096
_SPARE = 64
"""A stream's positions differ in size from step to step: the buffer has a part of so many to spare."""


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


def file_of(number: int) -> str:
    """The name of this rank's file."""
    return f"rank-{number}.safetensors"


def whole(kind: str, tensors: dict[str, torch.Tensor]) -> Shards:
    """Shards that hold these tensors whole."""
    return {f"{kind}.{name}": Shard(tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()}


def divided(shards: Shards, rank: int, count: int) -> Shards:
    """An equal part of these numbers for one of `count` ranks that all have the same."""
    total = sum(shard.values.numel() for shard in shards.values())
    first, last = total * rank // count, total * (rank + 1) // count
    found, at = {}, 0
    for name, shard in shards.items():
        low, high = max(first - at, 0), min(last - at, shard.values.numel())
        if low < high:
            found[name] = Shard(shard.shape, shard.begin + low, shard.values.reshape(-1)[low:high])
        at += shard.values.numel()
    return found


@contextmanager
def flat(shards: Shards) -> Iterator[Shards]:
    """Yield flat views; afterwards copy back the tensors that are not contiguous."""
    rows = {name: shard._replace(values=shard.values.detach().flatten()) for name, shard in shards.items()}
    yield rows
    for name, shard in shards.items():
        if not shard.values.is_contiguous():  # else the row is the tensor's own memory
            shard.values.detach().copy_(rows[name].values.view(shard.values.shape))


class Staged(NamedTuple):
    """A safetensors file in memory: its head, and the numbers once `wait` has returned."""

    head: bytes
    numbers: memoryview
    tensors: Tensors
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
        self._buffer, self._pinned = torch.empty(0, dtype=torch.uint8), False
        self._copied: torch.cuda.Event | None = None

    def reserve(self, shards: Shards) -> None:
        """Have room for these and some more; what was in the buffer is lost."""
        size = sum(shard.values.nbytes for shard in shards.values())
        if self._buffer.numel() >= size:
            return
        self.close()  # first, so that there are never two
        size += size // _SPARE
        # Ordinary memory: torch's own pinned memory has a power of two of bytes, which may be twice as much.
        memory = torch.empty(size + _PAGE, dtype=torch.uint8)
        begin = -memory.data_ptr() % _PAGE
        self._buffer = memory[begin : begin + size]
        if self._stream is not None:
            self._pin(size)

    def _pin(self, size: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        self._pinned = error == 0
        if error:
            with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel of all would raise it
                torch.zeros(1, device=self._device)
            say(
                f"checkpoints are copied to memory that is not pinned, so each waits for its copy of {size / 1e9:.2f} "
                f"GB: cudaHostRegister returns error {error}"
            )

    def close(self) -> None:
        """Give the memory back, once nothing uses it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())  # type: ignore[no-untyped-call]
        self._buffer, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def fill(self, shards: Shards, number: int) -> Staged:
        """Begin to copy for this file; the buffer is in use until the caller is done with the result."""
        # The widest types first, so that each number lies where its type may lie.
        order = sorted((-shard.values.itemsize, name) for name, shard in shards.items() if shard.values.numel())
        rows = [(name, shards[name]) for _, name in order]
        size = sum(shard.values.nbytes for _, shard in rows)
        self.reserve(shards)
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
                tensors[name] = {"dtype": dtype, "shape": list(shape), "shards": [[number, begin, length, 1]]}
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
        """Let the GPU's later work wait for the copies; this process does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


def joined(some: Tensors, others: Tensors) -> Tensors:
    """Merge both into `some`; rows that continue in the next files become one row."""
    for name, tensor in others.items():
        one = some.setdefault(name, tensor)
        if one is tensor:
            continue
        rows: list[list[int]] = []
        for file, begin, length, count in sorted([*one["shards"], *tensor["shards"]], key=lambda row: row[1]):
            first, start, each, many = rows[-1] if rows else (0, 0, 0, 0)
            if (file, begin, length) == (first + many, start + each * many, each):
                rows[-1][3] += count
            else:
                rows.append([file, begin, length, count])
        one["shards"] = rows
    return some


def faults(tensors: Any, files: dict[str, Any]) -> Iterator[str]:  # noqa: ANN401  JSON that anybody may have written
    """What is wrong with the manifest's tensors: they must be whole, in these files."""
    if not isinstance(tensors, dict):
        yield "its manifest names no tensors"
        return
    known = next(number for number in itertools.count() if file_of(number) not in files)
    for name, tensor in tensors.items():
        match tensor:
            case {"dtype": str(dtype), "shape": [*shape], "shards": [*rows]} if dtype in TYPES and all(
                map(natural, shape)
            ):
                fault = _fault(math.prod(shape), rows, known)
            case _:
                fault = "has no type, shape and shards"
        if fault:
            yield f"tensor {name} {fault}"


def _fault(size: int, rows: list[Any], known: int) -> str:
    """`known` files are named by number."""
    end = 0
    for row in rows:
        match row:
            case [file, begin, length, count] if all(map(natural, row)) and length and count:
                pass
            case _:
                return "has a shard without a file, an offset and a length"
        if file + count > known:
            return f"is in {file_of(file + count - 1)}, which is not a file of this checkpoint"
        if begin != end:
            return f"{'lacks numbers' if begin > end else 'has numbers twice'}: {min(begin, end)} to {max(begin, end)}"
        end = begin + length * count
    return "" if end == size else f"has {end} numbers in its shards, but its shape needs {size}"


def misfit(path: Path, tensors: Tensors) -> str:
    """How the file differs from the manifest; empty if it does not."""
    number = path.stem.removeprefix("rank-")
    own = int(number) if number.isdecimal() and path.name == file_of(int(number)) else -1
    wanted = sorted(
        (name, tensor["dtype"], row[2])
        for name, tensor in tensors.items()
        for row in tensor["shards"]
        if row[0] <= own < row[0] + row[3]
    )
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        found = sorted((name, part.get_dtype(), math.prod(part.get_shape())) for name, part in slices.items())
    return "" if found == wanted else f"{path.name} holds other tensors than the manifest says"


class MismatchError(ValueError):
    """The checkpoint is not of these tensors."""


class Reader:
    """Fills shards from a checkpoint whose manifest has been checked. Files are mapped: no more is read than needed."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder, self.tensors = folder, tensors
        self._files: dict[str, Any] = {}

    def fill(self, shards: Shards) -> None:
        """Read this rank's shards; each rank decides for itself what it reads."""
        self.require(shards)
        with flat(shards) as rows:
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
