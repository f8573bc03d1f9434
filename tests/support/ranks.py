"""Ranks as threads of one process: torch.distributed's calls go between them, and what each hears is counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dray.train import collectives
from dray.train.checkpoint import checkpoints as checkpoint
from dray.train.checkpoint import shards
from dray.train.checkpoint.checkpoints import Checkpoints

_GONE = None


class World:
    """So many ranks. `heard` has the bytes of each message that a rank was sent, by rank; sizes are messages too."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.heard: list[list[int]] = [[] for _ in range(count)]
        self._own = threading.local()
        # All at once: of two threads that ask a defaultdict for the same one, each may get its own.
        pairs = itertools.product(range(count), repeat=2)
        self._sent: dict[tuple[int, int], SimpleQueue[Any]] = {pair: SimpleQueue() for pair in pairs}

    def each(self, do: Callable[[int], Any]) -> list[Any]:
        """What it returns on each rank, or raises there."""
        found: list[Any] = [None] * self.count

        def run(rank: int) -> None:
            self._own.rank = rank
            try:
                found[rank] = do(rank)
            except Exception as error:
                found[rank] = error
                for other in range(self.count):  # as gloo's connections tell the others
                    self._sent[rank, other].put(_GONE)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.count)]
        with self._patched():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found

    @contextmanager
    def _patched(self) -> Iterator[None]:
        calls = {
            "is_initialized": lambda: True,
            "get_rank": lambda: self._own.rank,
            "get_world_size": lambda: self.count,
            "isend": self._send,
            "irecv": self._receive,
            "broadcast": self._broadcast,
            "barrier": lambda group: None,
            "get_global_rank": lambda group, rank: group[rank],
        }
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(dist, **calls))
            stack.enter_context(mock.patch.object(collectives, "_control", "all"))
            stack.enter_context(mock.patch.object(checkpoint, "ThreadPoolExecutor", _AtOnce))
            stack.enter_context(mock.patch.object(checkpoint, "say", lambda text: self._own.rank or print(text)))
            yield

    def _send(self, tensor: torch.Tensor, rank: int, group: Any) -> Any:
        del group
        self._sent[self._own.rank, rank].put(tensor.clone())
        return SimpleNamespace(wait=lambda timeout: None)

    def _receive(self, tensor: torch.Tensor, rank: int, group: Any) -> Any:
        del group
        return SimpleNamespace(wait=lambda timeout: self._hear(tensor, rank))

    def _hear(self, tensor: torch.Tensor, rank: int) -> None:
        found = self._sent[rank, self._own.rank].get()
        if found is _GONE:
            raise RuntimeError(f"Connection closed by peer: rank {rank}")
        self.heard[self._own.rank].append(found.nbytes)
        tensor.copy_(found)

    def _broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        if self._own.rank != source:
            self._hear(tensor, source)
            return
        for other in group if isinstance(group, range) else range(self.count):
            if other != source:
                self._send(tensor, other, group)


class _AtOnce:
    """In the thread of its rank."""

    def __init__(self, workers: int) -> None:
        del workers

    def submit(self, do: Callable[..., None], *arguments: Any) -> Future[None]:
        found: Future[None] = Future()
        try:
            found.set_result(do(*arguments))
        except Exception as error:
            found.set_exception(error)
        return found


class Sharded:
    """A strategy that shards rows of tensors of these shapes as fsdp does."""

    device, scaler = torch.device("cpu"), None

    def __init__(self, shapes: dict[str, tuple[int, int]], rank: int, world: int) -> None:
        self.own, self.read = {}, {}
        for number, (name, (rows, width)) in enumerate(shapes.items()):
            each = -(-rows // world)
            begin, end = min(each * rank, rows), min(each * (rank + 1), rows)
            values = torch.arange(begin * width, end * width, dtype=torch.float32) + number
            self.own[name] = shards.Shard((rows, width), begin * width, values.view(-1, width))

    def state(self) -> shards.Shards:
        return self.own

    def load(self, reader: shards.Reader, updates: int) -> None:
        del updates
        self.read = {name: one._replace(values=torch.zeros_like(one.values)) for name, one in self.own.items()}
        reader.fill(self.read)

    def is_read(self) -> bool:
        """Whether what was loaded is what was saved."""
        return bool(self.read) and all(
            torch.equal(self.read[name].values, one.values) for name, one in self.own.items()
        )


def checkpoints(
    folder: Path, strategy: Any, *, mirror: str = "", keep: int = 9, notes: list[Any] | None = None
) -> Checkpoints:
    """Those of a run that nobody disturbs; what it writes into the metrics goes to `notes`."""
    config: Any = SimpleNamespace(
        checkpoints=str(folder), run="one", checkpoint=SimpleNamespace(keep=keep, mirror=mirror), image_sha256="",
        data=SimpleNamespace(sequence_length=1, streaming=False), train=SimpleNamespace(seed=0), dray="0",
        global_size=1,
    )  # fmt: skip
    lease: Any = SimpleNamespace(require=lambda: None)
    write = (lambda *event, **more: notes.append((event, more))) if notes is not None else (lambda *_, **__: None)
    metrics: Any = SimpleNamespace(write=write)
    made = Checkpoints(config, metrics, lease, dataset="")
    made.attach(strategy)
    return made
