"""From the GPU to the disk: each rank copies its shards to a buffer in the host's memory, then writes them as one file.

The GPU copies on a stream of its own. The host does not wait for it, and training waits, on the GPU, only before the
next update changes the weights.
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
"""The buffer is by 1/64 larger than the first checkpoint: a stream's positions may grow from step to step."""


class Staged(NamedTuple):
    """A safetensors file in memory: its header, and its numbers, which are complete after `wait`."""

    rank: int
    header: bytes
    numbers: memoryview
    tensors: Tensors
    sources: list[torch.Tensor]  # keeps the GPU's tensors alive until they are copied
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the numbers are copied; only a thread that does not train calls it."""
        if self.copied is not None:
            self.copied.synchronize()
        self.sources.clear()

    def write(self, folder: Path, moved: Callable[[int], None] = lambda _size: None) -> dict[str, Any]:
        """Write this rank's file; return its part of the manifest. `moved` is called with the size of each block."""
        self.wait()
        name = file_of(self.rank)
        file = manifest.write_file(folder / name, self.header, self.numbers, moved=moved)
        return {"files": {name: file}, "tensors": self.tensors}


class Staging:
    """A buffer in the host's memory, which each checkpoint of a run fills anew; with a GPU it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffer, self._pinned = torch.empty(0, dtype=torch.uint8), False
        self._copied: torch.cuda.Event | None = None

    def reserve(self, shards: Shards) -> None:
        """Make sure that these shards fit into the buffer. A new buffer does not keep what the old one held."""
        size = sum(shard.values.nbytes for shard in shards.values())
        if self._buffer.numel() >= size:
            return
        self.close()  # first, so that there are never two buffers
        size += size // _SPARE
        # Not torch's own pinned memory, which rounds up to a power of two: up to twice as much.
        memory = torch.empty(size + _PAGE, dtype=torch.uint8)
        begin = -memory.data_ptr() % _PAGE
        self._buffer = memory[begin : begin + size]
        if self._stream is not None:
            self._pin(size)

    def _pin(self, size: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        self._pinned = error == 0
        if error:
            # CUDA keeps the error for the next call: let this one raise it, and not one of the training.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            say(
                f"checkpoints are copied to memory that is not pinned, so each waits for its copy of {size / 1e9:.2f} "
                f"GB: cudaHostRegister returns error {error}"
            )

    def close(self) -> None:
        """Free the buffer. The caller has waited until the last checkpoint is written."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())  # type: ignore[no-untyped-call]
        self._buffer, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def fill(self, shards: Shards, rank: int) -> Staged:
        """Begin to copy this rank's shards into the buffer; call it again only when the result is written."""
        names = [name for name, shard in shards.items() if shard.values.numel()]
        # The widest types first: then every tensor is aligned.
        names.sort(key=lambda name: (-shards[name].values.itemsize, name))
        self.reserve(shards)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        header, tensors, size = {}, {}, 0
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name in names:
                shape, begin, values = shards[name]
                end, length = size + values.nbytes, values.numel()
                self._buffer[size:end].view(values.dtype).copy_(values.detach().reshape(-1), non_blocking=True)
                dtype = _NAMES[values.dtype]
                shape_in_file = list(shape) if length == math.prod(shape) else [length]
                header[name] = {"dtype": dtype, "shape": shape_in_file, "data_offsets": [size, end]}
                tensors[name] = {"dtype": dtype, "shape": list(shape), "shards": [[rank, begin, length, 1]]}
                size = end
        if self._stream is not None:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        header_text = json.dumps(header).encode()
        header_text = header_text.ljust(-(-len(header_text) // 8) * 8)
        buffer: Any = self._buffer.numpy()  # numpy's arrays are buffers, and its types do not say so
        sources = [shards[name].values for name in names]
        start_of_file = len(header_text).to_bytes(8, "little") + header_text
        return Staged(rank, start_of_file, memoryview(buffer)[:size], tensors, sources, self._copied)

    def fence(self) -> None:
        """Let the kernels that follow wait, on the GPU, until the buffer is filled; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


def write(folder: Path, batches: Iterable[Shards], about: dict[str, Any]) -> None:
    """Write a checkpoint outside of a run, with `about` in its manifest; only one batch is in memory at a time."""
    staging = Staging(torch.device("cpu"))
    parts = (staging.fill(batch, number).write(folder) for number, batch in enumerate(batches))
    files: dict[str, Any] = reduce(join, parts)
    manifest.write(folder, {**about, "version": manifest.VERSION, **files})
