"""Text becomes tokens while the model trains, and none stay on the disk.

A step's global batch has so many places; each place is a lane that reads parts of the text and packs its own blocks.
All parts of all passes stand in one row, and of n lanes each takes every n-th: none is taken twice. A lane is the same
whoever has it, so the samples of a step are the same on any number of ranks. Where each lane is goes into the
checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dray.train import sources
from dray.train.order import permuted
from dray.train.sources import Piece, Reading
from dray.train.stop import stop

_AT_ONCE = 16  # documents
_EMPTY = 20  # passes over nothing


class Lane:
    """One place of the batch: the parts of the text that are its own."""

    def __init__(self, number: int, stream: Stream) -> None:
        self.number, self.stream = number, stream
        self.part, self.taken = number, 0  # in the endless row of parts; and documents taken of that one
        self.left = np.zeros(0, np.int64)
        self._documents: Iterator[str] | None = None

    def block(self, length: int) -> NDArray[np.int64]:
        """The next tokens."""
        empty = 0
        while len(self.left) < length:
            if self._documents is None:
                self._documents = self.stream.documents(self.part, self.taken)
            texts = list(islice(self._documents, _AT_ONCE))
            if texts:
                empty, self.taken = 0, self.taken + len(texts)
                self.left = np.concatenate([self.left, np.asarray(self.stream.encode(texts), np.int64)])
                continue
            self._documents, self.taken, self.part, empty = None, 0, self.part + self.stream.count, empty + 1
            if empty > _EMPTY * self.stream.parts:
                stop("the training text is empty", wanted="documents", found="none", fix="check data.train")
        found, self.left = self.left[:length], self.left[length:]
        return found

    def state(self) -> list[Any]:
        """What `load` understands; arrays are never written to, so they may be kept."""
        return [self.number, self.part, self.taken, self.left]

    def load(self, state: list[Any]) -> None:
        """Stand where that lane stood."""
        _, self.part, self.taken, left = state
        self.left, self._documents = np.asarray(left, np.int64), None


class Stream:
    """A feed of as many lanes as a global batch has samples; a rank opens those that it is asked for."""

    def __init__(
        self,
        pieces: list[Piece],
        reading: Reading,
        encode: Callable[[list[str]], list[int]],
        *,
        lanes: int,
        block: int,
        seed: int,
    ) -> None:
        if not pieces:
            stop("the training text is empty", wanted="documents", found="none", fix="check data.train")
        self.pieces, self.reading, self.encode = pieces, reading, encode
        self.count, self.block, self.seed = lanes, block, seed
        # Where pieces are fewer than lanes, several lanes read one, and each takes its share of the documents.
        self.sharers = -(-lanes // len(pieces))
        self.parts = len(pieces) * self.sharers
        told = (pieces, reading.least, *([reading] if reading.chats else []))
        self.text = f"{len(pieces)} pieces, {zlib.crc32(repr(told).encode()):08x}"
        self._lanes: dict[int, Lane] = {}
        self._states: dict[int, list[Any]] = {}

    def documents(self, part: int, taken: int) -> Iterator[str]:
        """What is left of a part, in the row of all passes' parts: each pass has all of them, in another order."""
        turn, place = divmod(part, self.parts)
        number, share = divmod(permuted(place, self.parts, self.seed + turn), self.sharers)
        mine = islice(sources.documents(self.pieces[number], self.reading), share, None, self.sharers)
        return islice(mine, taken, None)

    def rows(self, samples: range) -> NDArray[np.int64]:
        """Each lane is asked for its samples in turn."""
        return np.stack([self._lane(sample % self.count).block(self.block) for sample in samples])

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            self._lanes[number] = Lane(number, self)
            if number in self._states:
                self._lanes[number].load(self._states[number])
        return self._lanes[number]

    def state(self) -> list[Any]:
        return [lane.state() for lane in self._lanes.values()]

    def load(self, states: list[Any]) -> None:
        self._states = {lane[0]: lane for state in states for lane in state}
        self._lanes.clear()
