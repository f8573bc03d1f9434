"""The first rank of each node copies to the mirror what its node's ranks wrote; rank 0 asks all of them, and waits.

They speak through torch's store, which any thread may use beside the training. What a node has not sent, rank 0 sends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

POLL_S = 1.0
SILENT_S = 600.0
_BEAT_S = 5.0


class Nodes:
    """`store` is torch's; None where there is one node."""

    def __init__(self, store: Store | None, node: int, count: int) -> None:
        self.store, self.node, self.count = store, node, count
        self._number, self._told = 0, 0.0

    def share(self, names: list[str]) -> list[str]:
        """Names in the order of the ranks that wrote them: those of this node."""
        return names[len(names) * self.node // self.count : len(names) * (self.node + 1) // self.count]

    def ask(self, path: str) -> None:
        """On rank 0: let each node copy its share."""
        self._number += 1
        if self.store:
            self.store.set(self._key(), path)

    def wait(self, moved: Callable[[int], None]) -> bool:
        """On rank 0: until all have tried; whether all have sent theirs. `moved` is told when one of them goes on.
        TimeoutError: none of them does, and the copy is tried again later."""
        beats, since = 0, time.monotonic()
        while self.store and self.store.add(self._key("done"), 0) < self.count - 1:
            if (seen := self.store.add(self._key("beats"), 0)) != beats:
                beats, since = seen, time.monotonic()
                moved(1)
            if time.monotonic() > since + SILENT_S:
                raise TimeoutError(f"another node has copied nothing for {SILENT_S:.0f} s")
            time.sleep(POLL_S)
        return not self.store or not self.store.add(self._key("failed"), 0)

    def serve(self, copy: Callable[[str], str]) -> None:
        """On another node's first rank, for as long as the run lasts: `copy` returns why it could not."""
        assert self.store
        self._number = 1
        try:
            while True:
                if not self.store.check([self._key()]):
                    time.sleep(POLL_S)
                    continue
                if copy(self.store.get(self._key()).decode()):
                    self.store.add(self._key("failed"), 1)
                self.store.add(self._key("done"), 1)
                self._number += 1
        except RuntimeError:  # the store has gone: the run ends
            return

    def beat(self, moved: int) -> None:
        """On another node's first rank: so many bytes are copied."""
        del moved
        if self.store and time.monotonic() - self._told > _BEAT_S:
            self._told = time.monotonic()
            self.store.add(self._key("beats"), 1)

    def _key(self, what: str = "path") -> str:
        return f"mirror/{self._number}/{what}"


def of_run() -> Nodes:
    """Those of the run, as its ranks are numbered."""
    each, world = _each(), dist.get_world_size()
    return Nodes(_get_default_store() if world > each else None, dist.get_rank() // each, -(-world // each))


def is_helper() -> bool:
    """Whether this rank is the first of a node that is not rank 0's."""
    return dist.get_rank() > 0 and dist.get_rank() % _each() == 0


def _each() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
