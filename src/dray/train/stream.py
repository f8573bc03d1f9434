"""Text becomes tokens while the model trains, and none stay on the disk.

A step's global batch has so many places; each place is a lane that reads its own part of the text and packs its own
blocks. A lane is the same whoever has it, so the samples of a step are the same on any number of ranks, and no document
is read by two lanes. Where each lane is goes into the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dray.train import sources
from dray.train.order import permuted
from dray.train.sources import Piece
from dray.train.stop import stop

_AT_ONCE = 16  # documents


class Lane:
    """One place of the batch: the parts of the text that are its own, in each pass in another order."""

    def __init__(self, number: int, stream: Stream) -> None:
        self.number, self.stream = number, stream
        self.turn, self.part, self.taken = 0, 0, 0  # the pass, its how-manieth part, documents taken of that
        self.left = np.zeros(0, np.int64)
        self._documents: Iterator[str] | None = None

    def block(self, length: int) -> NDArray[np.int64]:
        """The next tokens."""
        empty = 0
        while len(self.left) < length:
            if self._documents is None:
                self._documents = self.stream.documents(self.number, self.turn, self.part, self.taken)
            texts = list(islice(self._documents, _AT_ONCE))
            if texts:
                self.taken += len(texts)
                self.left = np.concatenate([self.left, np.asarray(self.stream.encode(texts), np.int64)])
                continue
            self._documents, self.taken, self.part = None, 0, self.part + 1
            if self.part >= self.stream.parts(self.number):
                self.turn, self.part, empty = self.turn + 1, 0, empty + 1
                if empty > 1:
                    stop("the training text is empty", wanted="documents", found="none", fix="check data.text")
        found, self.left = self.left[:length], self.left[length:]
        return found

    def state(self) -> list[Any]:
        """JSON that `load` understands."""
        return [self.number, self.turn, self.part, self.taken, self.left.tolist()]

    def load(self, state: list[Any]) -> None:
        """Stand where that lane stood."""
        _, self.turn, self.part, self.taken, left = state
        self.left, self._documents = np.asarray(left, np.int64), None


class Stream:
    """A feed of as many lanes as a global batch has samples; a rank opens those that it is asked for."""

    def __init__(
        self,
        pieces: list[Piece],
        column: str,
        encode: Callable[[list[str]], list[int]],
        *,
        lanes: int,
        block: int,
        seed: int,
    ) -> None:
        if not pieces:
            stop("the training text is empty", wanted="documents", found="none", fix="check data.text")
        self.pieces, self.column, self.encode = pieces, column, encode
        self.count, self.block, self.seed = lanes, block, seed
        # Where pieces are fewer than lanes, several lanes read one, and each takes its share of the documents.
        self.sharers = -(-lanes // len(pieces))
        self._lanes: dict[int, Lane] = {}
        self._states: dict[int, list[Any]] = {}

    def parts(self, lane: int) -> int:
        """How many parts of the text are the lane's in one pass."""
        return len(range(lane, len(self.pieces) * self.sharers, self.count))

    def documents(self, lane: int, turn: int, part: int, taken: int) -> Iterator[str]:
        """What is left of the lane's so-manieth part in that pass."""
        whole = len(self.pieces) * self.sharers
        number, share = divmod(permuted(lane + part * self.count, whole, self.seed + turn), self.sharers)
        mine = islice(sources.documents(self.pieces[number], self.column), share, None, self.sharers)
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
