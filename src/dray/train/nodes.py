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

from dray.train.errors import say

POLL_S = 1.0
SILENT_S = 600.0
_BEAT_S = 5.0
_SHOWN = 6
# Whatever the number of checkpoints, each node has one key. Of each checkpoint there are two counts.
_LATEST, _BEATS, _SENT = "mirror/latest", "mirror/beats", "mirror/sent"


class Nodes:
    """`store` is torch's; None where there is one node."""

    def __init__(self, store: Store | None, node: int, count: int) -> None:
        self.store, self.node, self.count = store, node, count
        self._number, self._told = 0, 0.0

    def share(self, names: list[str], node: int | None = None) -> list[str]:
        """This node's or another node's part of the names, which are ordered by rank."""
        node = self.node if node is None else node
        return names[len(names) * node // self.count : len(names) * (node + 1) // self.count]

    def ask(self, path: str) -> None:
        """On rank 0: let each node copy its share."""
        self._number += 1
        if self.store:
            self.store.set(_LATEST, f"{self._number} {path}")

    def wait(self, moved: Callable[[int], None]) -> list[int]:
        """On rank 0: wait until all nodes have tried or stand still; return the nodes that did not send their share.

        `moved` is told when one of them goes on.
        """
        beats, since, others = 0, time.monotonic(), self.count - 1
        while self.store and self.store.add(self._key("tried"), 0) < others:
            if (seen := self.store.add(_BEATS, 0)) != beats:
                beats, since = seen, time.monotonic()
                moved(1)
            if time.monotonic() > since + SILENT_S:
                left = self._unsent()
                named = ", ".join(map(str, left[:_SHOWN])) + f" and {len(left) - _SHOWN} more" * (len(left) > _SHOWN)
                say(f"WARNING: node {named} sent nothing to the mirror for {SILENT_S:.0f} s: rank 0 sends its files")
                return left
            time.sleep(POLL_S)
        return self._unsent() if self.store and self.store.add(self._key("sent"), 0) < others else []

    def _unsent(self) -> list[int]:
        """Of the latest request. Each node is asked for, so this is for when one of them is in trouble."""
        assert self.store
        keys = {node: f"{_SENT}/{node}" for node in range(1, self.count)}
        own = str(self._number).encode()
        return [node for node, key in keys.items() if not self.store.check([key]) or self.store.get(key) != own]

    def serve(self, copy: Callable[[str], str]) -> None:
        """On another node's first rank, for as long as the run lasts: `copy` returns why it could not.

        It goes to the latest request: rank 0 no longer waits for those before.
        """
        assert self.store
        try:
            while True:
                latest = self.store.get(_LATEST).decode() if self.store.check([_LATEST]) else "0"
                number, _, path = latest.partition(" ")
                if int(number) == self._number:
                    time.sleep(POLL_S)
                    continue
                self._number = int(number)
                if not copy(path):
                    self.store.set(f"{_SENT}/{self.node}", number)
                    self.store.add(self._key("sent"), 1)
                self.store.add(self._key("tried"), 1)
        except RuntimeError:  # the store has gone: the run ends
            return

    def beat(self, moved: int) -> None:
        """On another node's first rank: so many bytes are copied."""
        del moved
        if self.store and time.monotonic() - self._told > _BEAT_S:
            self._told = time.monotonic()
            self.store.add(_BEATS, 1)

    def _key(self, what: str) -> str:
        """How many nodes have tried what is asked for, or have sent it."""
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
