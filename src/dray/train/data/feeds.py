"""Samples by number, the same on any number of ranks: of one dataset, of a mix of several, or of a stream.

A stream tokenizes while the run trains, and keeps no tokens on the disk. Each sample of the global batch has a stream
shard of its own, which reads parts of the dataset and cuts its own samples. The parts of all epochs are numbered in
order, and each of n shards reads every n-th part. A shard is the same on any rank, and checkpoints hold its position.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dray.contract.findings import ConfigError
from dray.train.data import formats
from dray.train.data.formats import Piece, Reading
from dray.train.data.order import Mix, Order, permuted
from dray.train.data.packing import Packed
from dray.train.data.token_cache import Tokens
from dray.train.recipe_schema import Source

_DOCUMENTS = 16  # that a shard tokenizes at once
_EMPTY_EPOCHS = 20  # epochs without a document

Rows: TypeAlias = NDArray[np.int64]


class Feed(Protocol):
    """Samples by number. They are the same on any number of ranks."""

    @property
    def identity(self) -> str:
        """The dataset's identity, which a checkpoint keeps."""

    def rows(self, samples: range) -> Rows:
        """The tokens of these samples, a row each."""

    def state(self) -> list[Any] | None:
        """The positions of the stream shards that this rank reads."""

    def load(self, states: Mapping[int, list[Any]]) -> None:
        """Resume from the positions of all ranks, by the number of the shard."""


class Numbered:
    """A feed without a position: a sample's number alone decides its tokens, so checkpoints hold nothing of it."""

    def state(self) -> None:
        return None

    def load(self, states: Mapping[int, list[Any]]) -> None:
        pass


@dataclass(frozen=True)
class Mapped(Numbered):
    """Tokens on this node's disk: any sample is found at once."""

    tokens: Tokens
    order: Order

    @property
    def identity(self) -> str:
        packing = f", {self.tokens.strategy}" if isinstance(self.tokens, Packed) else ""
        return f"{self.order.total} tokens{packing}"

    def rows(self, samples: range) -> Rows:
        return np.stack([self.tokens.slice(self.order.start(sample), self.order.length) for sample in samples])


class Mixed(Numbered):
    """A mix of several datasets, by weight."""

    def __init__(self, sources: Mapping[str, Source], feeds: Mapping[str, Mapped], *, seed: int) -> None:
        self.sources, self.feeds = sources, feeds
        self.mix = Mix([source.weight for source in sources.values()], seed)

    @property
    def identity(self) -> str:
        return "; ".join(
            f"{name} of {self.feeds[name].identity}, weight {source.weight!r}" for name, source in self.sources.items()
        )

    def rows(self, samples: range) -> Rows:
        feeds = [*self.feeds.values()]
        places = [self.mix.place(sample) for sample in samples]
        return np.concatenate([feeds[source].rows(range(row, row + 1)) for source, row in places])


class Shard:
    """The parts of a stream that make one sample of each step. A state is where another process reads on."""

    def __init__(self, number: int, stream: Stream, state: Sequence[Any] | None = None) -> None:
        self.number, self.stream = number, stream
        self.part = number  # counted over all epochs
        self.documents_read = 0  # documents of that part
        self.rest = np.zeros(0, np.int64)  # tokens that no sample has yet
        self._documents: Iterator[str] | None = None
        if state is not None:
            _, self.part, self.documents_read, rest = state
            self.rest = np.asarray(rest, np.int64)

    def take(self, length: int) -> NDArray[np.int64]:
        """The next tokens."""
        empty = 0
        while len(self.rest) < length:
            if self._documents is None:
                self._documents = self.stream.documents(self.part, self.documents_read)
            documents = list(islice(self._documents, _DOCUMENTS))
            if documents:
                empty, self.documents_read = 0, self.documents_read + len(documents)
                self.rest = np.concatenate([self.rest, np.asarray(self.stream.encode(documents), np.int64)])
                continue
            self._documents, self.documents_read, self.part, empty = None, 0, self.part + self.stream.count, empty + 1
            if empty > _EMPTY_EPOCHS * self.stream.parts:
                raise _no_documents()
        tokens, self.rest = self.rest[:length], self.rest[length:]
        return tokens

    def state(self) -> list[Any]:
        """The position; arrays are never written to, so it may be kept."""
        return [self.number, self.part, self.documents_read, self.rest]


class Stream:
    """A feed of as many shards as a global batch has samples; a rank opens the shards of its own samples."""

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
            raise _no_documents()
        self.pieces, self.reading, self.encode = pieces, reading, encode
        self.count, self.length, self.seed = shards, length, seed
        # If there are fewer pieces than shards, several shards read one, and each takes its share of the documents.
        self.sharers = -(-shards // len(pieces))
        self.parts = len(pieces) * self.sharers
        everything = repr((pieces, reading, reading.map and reading.map.text))
        self.identity = f"{len(pieces)} pieces, {zlib.crc32(everything.encode()):08x}"
        self._shards: dict[int, Shard] = {}
        self._states: Mapping[int, list[Any]] = {}
        # The tokenizer works without the interpreter's lock; a rank has the cores that the runner bound it to.
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "tokenize")

    def documents(self, part: int, taken: int) -> Iterator[str]:
        """The rest of a part, numbered over all epochs: each epoch has all parts in another order."""
        epoch, place = divmod(part, self.parts)
        number, share = divmod(permuted(place, self.parts, self.seed + epoch), self.sharers)
        documents = islice(formats.documents(self.pieces[number], self.reading), share, None, self.sharers)
        return islice(documents, taken, None)

    def rows(self, samples: range) -> Rows:
        """Each shard makes its samples in their order, in one thread."""
        places: dict[int, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(sample % self.count, []).append(place)
        tokens = np.empty((len(samples), self.length), np.int64)

        def take(shard: Shard, places: list[int]) -> None:
            for place in places:
                tokens[place] = shard.take(self.length)

        for _ in self._threads.map(take, map(self.shard, places), places.values()):
            pass  # an error of a thread is raised here
        return tokens

    def shard(self, number: int) -> Shard:
        """The shard, which begins or resumes when it is first needed."""
        if number not in self._shards:
            self._shards[number] = Shard(number, self, self._states.get(number))
        return self._shards[number]

    def state(self) -> list[Any]:
        return [shard.state() for shard in self._shards.values()]

    def load(self, states: Mapping[int, list[Any]]) -> None:
        self._states = states
        self._shards.clear()


def _no_documents() -> ConfigError:
    return ConfigError("the training dataset is empty", wanted="documents", found="none", fix="check data.train")
