"""A checkpoint on its way to the disk: each rank copies its shards to the host's memory, then writes them as one file.

Beside a GPU the copies run on a stream of their own: training waits for them on the GPU alone, and no sooner than it
would overwrite what is being copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dray.train.checkpoint import manifest
from dray.train.checkpoint.shards import TYPES, Shards, Tensors, file_of, join
from dray.train.errors import say

_NAMES = {dtype: name for name, dtype in TYPES.items()}
_PAGE = 4096
_SPARE = 64
"""A stream's positions differ in size from step to step: the buffer has a part of so many to spare."""


class Staged(NamedTuple):
    """A safetensors file in memory: its header, and the numbers once they are copied."""

    rank: int
    header: bytes
    numbers: memoryview
    tensors: Tensors
    sources: list[torch.Tensor]  # in memory until they are copied
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the numbers are copied; for a thread that is not training."""
        if self.copied is not None:
            self.copied.synchronize()
        self.sources.clear()

    def write(self, folder: Path, moved: Callable[[int], None] = lambda _size: None) -> dict[str, Any]:
        """Write the file; return what a manifest says of it. `moved` is called with the size of each block."""
        self.wait()
        name = file_of(self.rank)
        file = manifest.write_file(folder / name, self.header, self.numbers, moved=moved)
        return {"files": {name: file}, "tensors": self.tensors}


class Staging:
    """One buffer in the host's memory, pinned beside a GPU, for all checkpoints of a run."""

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

    def fill(self, shards: Shards, rank: int) -> Staged:
        """Begin to copy this rank's shards; the buffer is in use until the caller is done with the result."""
        # The widest types first: then every tensor is aligned.
        filled = sorted((name for name in shards if shards[name].values.numel()), key=lambda name: (
            -shards[name].values.itemsize, name
        ))  # fmt: skip
        self.reserve(shards)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        header, tensors, at = {}, {}, 0
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name in filled:
                shape, begin, values = shards[name]
                end, length = at + values.nbytes, values.numel()
                self._buffer[at:end].view(values.dtype).copy_(values.detach().reshape(-1), non_blocking=True)
                dtype = _NAMES[values.dtype]
                in_file = list(shape) if length == math.prod(shape) else [length]
                header[name] = {"dtype": dtype, "shape": in_file, "data_offsets": [at, end]}
                tensors[name] = {"dtype": dtype, "shape": list(shape), "shards": [[rank, begin, length, 1]]}
                at = end
        if self._stream is not None:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        buffer: Any = self._buffer.numpy()  # numpy's arrays are buffers, and its types do not say so
        sources = [shards[name].values for name in filled]
        start = len(text).to_bytes(8, "little") + text
        return Staged(rank, start, memoryview(buffer)[:at], tensors, sources, self._copied)

    def fence(self) -> None:
        """Let the GPU's later work wait for the copies; this process does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


def write(folder: Path, batches: Iterable[Shards], about: dict[str, Any]) -> None:
    """Write a checkpoint outside of a run, with `about` in its manifest; one batch at a time is in memory."""
    staging = Staging(torch.device("cpu"))
    parts = (staging.fill(batch, number).write(folder) for number, batch in enumerate(batches))
    files: dict[str, Any] = reduce(join, parts)
    manifest.write(folder, {**about, "version": manifest.VERSION, **files})
