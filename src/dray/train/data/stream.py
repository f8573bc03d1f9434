"""Tokenize while training, and keep no tokens on the disk.

Each sample of the global batch has a stream shard of its own, which reads parts of the dataset and packs its own
samples. The parts of all epochs stand in one row, and of n shards each takes every n-th: none is taken twice. A shard
is the same on whichever rank, so the samples of a step are the same on any number of ranks. Their positions go into
the checkpoint.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dray.contract.findings import ConfigError
from dray.train.data import formats
from dray.train.data.formats import Piece, Reading
from dray.train.data.order import permuted

_AT_ONCE = 16  # documents
_EMPTY = 20  # epochs without a document


class Shard:
    """The parts of the dataset that make one sample of each step."""

    def __init__(self, number: int, stream: Stream) -> None:
        self.number, self.stream = number, stream
        self.part, self.taken = number, 0  # in the endless row of parts; and documents taken of that one
        self.left = np.zeros(0, np.int64)
        self._documents: Iterator[str] | None = None

    def take(self, length: int) -> NDArray[np.int64]:
        """The next tokens."""
        empty = 0
        while len(self.left) < length:
            if self._documents is None:
                self._documents = self.stream.documents(self.part, self.taken)
            documents = list(islice(self._documents, _AT_ONCE))
            if documents:
                empty, self.taken = 0, self.taken + len(documents)
                self.left = np.concatenate([self.left, np.asarray(self.stream.encode(documents), np.int64)])
                continue
            self._documents, self.taken, self.part, empty = None, 0, self.part + self.stream.count, empty + 1
            if empty > _EMPTY * self.stream.parts:
                raise ConfigError(
                    "the training dataset is empty", wanted="documents", found="none", fix="check data.train"
                )
        found, self.left = self.left[:length], self.left[length:]
        return found

    def state(self) -> list[Any]:
        """What `load` understands; arrays are never written to, so they may be kept."""
        return [self.number, self.part, self.taken, self.left]

    def load(self, state: list[Any]) -> None:
        """Resume from this shard's position."""
        _, self.part, self.taken, left = state
        self.left, self._documents = np.asarray(left, np.int64), None


class Stream:
    """A feed of as many shards as a global batch has samples; a rank opens those that it is asked for."""

    def __init__(
        self,
        pieces: list[Piece],
        reading: Reading,
        encode: Callable[[list[str]], list[int]],
        *,
        shards: int,
        length: int,
        seed: int,
    ) -> None:
        if not pieces:
            raise ConfigError("the training dataset is empty", wanted="documents", found="none", fix="check data.train")
        self.pieces, self.reading, self.encode = pieces, reading, encode
        self.count, self.length, self.seed = shards, length, seed
        # Where pieces are fewer than shards and could not be cut, several shards read one, and each takes its share of
        # the documents.
        self.sharers = -(-shards // len(pieces))
        self.parts = len(pieces) * self.sharers
        files = (pieces, reading.least, *([reading] if reading.chats else []))
        if reading.map:
            files = (*files, reading.map.text)
        self.identity = f"{len(pieces)} pieces, {zlib.crc32(repr(files).encode()):08x}"
        self._shards: dict[int, Shard] = {}
        self._states: Mapping[int, list[Any]] = {}
        # The tokenizer works without the interpreter's lock; a rank has the cores that the runner bound it to.
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "tokenize")

    def documents(self, part: int, taken: int) -> Iterator[str]:
        """The rest of a part, numbered over all epochs: each epoch has all parts in another order."""
        epoch, place = divmod(part, self.parts)
        number, share = divmod(permuted(place, self.parts, self.seed + epoch), self.sharers)
        own = islice(formats.documents(self.pieces[number], self.reading), share, None, self.sharers)
        return islice(own, taken, None)

    def rows(self, samples: range) -> NDArray[np.int64]:
        """Each shard gives its samples in their order, in one thread; the shards are beside one another."""
        places: dict[int, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(sample % self.count, []).append(place)
        found = np.empty((len(samples), self.length), np.int64)

        def take(shard: Shard, rows: list[int]) -> None:
            for row in rows:
                found[row] = shard.take(self.length)

        for _ in self._threads.map(take, map(self._shard, places), places.values()):
            pass  # what went wrong in a thread is raised here
        return found

    def shares(self, samples: range) -> dict[str, float]:
        del samples
        return {}

    def by_source(self, samples: Iterable[int]) -> dict[str, list[int]]:
        return {"data.train": [*samples]}

    def _shard(self, number: int) -> Shard:
        if number not in self._shards:
            self._shards[number] = Shard(number, self)
            if number in self._states:
                self._shards[number].load(self._states[number])
        return self._shards[number]

    def state(self) -> list[Any]:
        return [shard.state() for shard in self._shards.values()]

    def load(self, states: Mapping[int, list[Any]]) -> None:
        self._states = states
        self._shards.clear()
