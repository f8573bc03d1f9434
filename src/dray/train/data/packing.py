"""Documents kept whole: each sample has as many as fit by best fit, the longest first, and padding behind them.

trl's `packing_strategy` has the same names: bfd cuts the end of a document that is longer than a sample, and bfd_split
makes several pieces of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dray.contract.findings import counted
from dray.train.data.token_cache import Tokens

PADDING = 1 << 32
"""The mark of a token that fills a sample; above those in token_cache.py, which are kept on the disk."""


@dataclass(frozen=True)
class Packed(Tokens):
    """The tokens of samples side by side, each filled up."""

    begins: NDArray[np.int64]
    """Where each piece of a document begins; a sample's pieces are side by side, in the order of the dataset."""
    lengths: NDArray[np.int64]
    bounds: NDArray[np.int64]
    """The first piece of each sample, and behind the last one their number."""
    length: int
    pad: int
    strategy: str

    @property
    def total(self) -> int:
        return (len(self.bounds) - 1) * self.length

    def first(self, most: int) -> Packed:
        """The first whole samples, of at most this many tokens."""
        return replace(self, bounds=self.bounds[: most // self.length + 1]) if most else self

    def slice(self, start: int, length: int) -> NDArray[np.int64]:
        """The first `length` tokens of the sample that begins at `start`."""
        number = start // self.length
        row, place = np.full(self.length, self.pad | PADDING, np.int64), 0
        for piece in range(self.bounds[number], self.bounds[number + 1]):
            begin, size = int(self.begins[piece]), int(self.lengths[piece])
            row[place : place + size] = self.ids[begin : begin + size]
            place += size
        return row[:length]

    def sizes(self) -> NDArray[np.int64]:
        """The lengths of all documents that have a piece in the samples."""
        begins = self.begins[: int(self.bounds[-1])].astype(np.uint64)
        documents = np.unique(np.searchsorted(self.starts, begins, side="right") - 1)
        starts = self.starts.astype(np.int64)
        return starts[documents + 1] - starts[documents]

    def counts(self) -> dict[str, int]:
        """How many documents are in the samples, how many are longer than one; tokens dropped, and those that fill."""
        sizes = self.sizes()
        over = np.maximum(sizes - self.length, 0)
        return {
            "documents": len(sizes),
            "longer_than_a_sample": int((over > 0).sum()),
            "dropped_tokens": int(over.sum()) if self.strategy == "bfd" else 0,
            "padding": self.total - int(self.lengths[: int(self.bounds[-1])].sum()),
        }

    def summary(self) -> str:
        """The counts as a line of the log."""
        counts = self.counts()
        longer = counted(counts["longer_than_a_sample"], "document")
        return (
            f"{counts['padding'] / max(self.total, 1):.2%} of {self.total:,} tokens are padding; "
            f"{longer} longer than a sample, {counts['dropped_tokens']:,} tokens dropped"
        )


def packed(tokens: Tokens, length: int, strategy: str, pad: int) -> Packed:
    """Pack the tokens into samples of this length; the same on every rank."""
    starts = tokens.starts.astype(np.int64)
    begins, lengths = starts[:-1], np.diff(starts)
    if strategy == "bfd_split":
        counts = -(-lengths // length)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
        begins = np.repeat(begins, counts) + number * length
        lengths = np.repeat(lengths, counts) - number * length
    lengths = np.minimum(lengths, length)
    # Samples are numbered as the dataset has their first pieces, so that the first ones are no longer than others.
    _, firsts, samples, sizes = np.unique(
        _best_fit(lengths, length), return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(firsts[samples], kind="stable")
    bounds = np.concatenate([[0], np.cumsum(sizes[np.argsort(firsts)])]).astype(np.int64)
    return Packed(
        tokens.ids, tokens.starts, begins[order], lengths[order], bounds, length, pad, strategy,
        content=tokens.content,
    )  # fmt: skip


def _best_fit(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The sample of each piece: the fullest that has room, or a new one; the longest pieces first."""
    samples = np.empty(len(lengths), np.int64)
    by_room: list[deque[int]] = [deque() for _ in range(size + 1)]
    rooms: list[int] = []  # that a sample has, sorted
    total = 0
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fullest = bisect_left(rooms, length)
        if fullest < len(rooms):
            room = rooms[fullest]
            sample = by_room[room].popleft()
            if not by_room[room]:
                del rooms[fullest]
        else:
            room, sample, total = size, total, total + 1
        samples[piece] = sample
        if left := room - length:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(sample)
    return samples
