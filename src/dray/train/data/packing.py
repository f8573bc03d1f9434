"""Documents kept whole: each sample has as many as fit by best fit, the longest first, and padding behind them.

trl's `packing_strategy` has the same names: bfd cuts the end of a document that is longer than a sample, and bfd_split
makes several of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dray.contract.findings import counted
from dray.train.data.token_cache import Tokens

PADDING = 1 << 32
"""The mark of a token that fills a sample; above those in token_cache.py, which are kept on the disk."""


@dataclass(frozen=True)
class Packed(Tokens):
    """The tokens of samples side by side, each filled up: what `slice` returns begins and ends where samples do."""

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

    def short(self, most: int) -> Packed:
        """The first whole samples, of at most this many tokens."""
        return replace(self, bounds=self.bounds[: most // self.length + 1]) if most else self

    def slice(self, start: int, length: int) -> NDArray[np.int64]:
        first, after, count = start // self.length, -(-(start + length) // self.length), len(self.bounds) - 1
        row = np.concatenate([self._sample(number % count) for number in range(first, after)])
        return row[start - first * self.length :][:length]

    def _sample(self, number: int) -> NDArray[np.int64]:
        row, place = np.full(self.length, self.pad | PADDING, np.int64), 0
        for piece in range(*self.bounds[number : number + 2].tolist()):
            begin, size = int(self.begins[piece]), int(self.lengths[piece])
            row[place : place + size] = self.ids[begin : begin + size]
            place += size
        return row

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


def told(counts: dict[str, int], total: int) -> str:
    """The counts as a line of the log; `total` includes padding."""
    found = f"{counts['padding'] / max(total, 1):.2%} of {total:,} tokens are padding"
    if longer := counts["longer_than_a_sample"]:
        what, dropped = "split", counts["dropped_tokens"]
        if dropped:
            share = dropped / (total - counts["padding"] + dropped)
            what = f"{dropped:,} tokens dropped, {share:.2%} (bfd_split drops none)"
        found += f"; {counted(longer, 'document')} longer than a sample, {what}"
    return found


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
    samples = _best_fit(lengths, length)
    # Samples are numbered as the dataset has their first pieces, so that the first ones are no longer than others.
    _, firsts, samples = np.unique(samples, return_index=True, return_inverse=True)
    rank = np.empty(len(firsts), np.int64)
    rank[np.argsort(firsts)] = np.arange(len(firsts))
    samples = rank[samples]
    order = np.argsort(samples, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(samples, minlength=len(firsts)))]).astype(np.int64)
    return Packed(
        tokens.ids, tokens.starts, begins[order], lengths[order], bounds, length, pad, strategy,
        content=tokens.content,
    )  # fmt: skip


def _best_fit(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The sample of each piece: the fullest that has room, or a new one; the longest pieces first.

    Pieces of one length are placed together. What is the fullest sample with room stays so until it has none: so each
    takes as many of them as it can, and samples with the same room take them alike.
    """
    found, total = np.empty(len(lengths), np.int64), 0
    free: dict[int, list[NDArray[np.int64]]] = {}  # samples by their room
    rooms = 0  # a bit for each room that a sample has, so that the smallest that is enough is found at once

    def put_back(room: int, samples: NDArray[np.int64]) -> None:
        nonlocal rooms
        if room and len(samples):
            free.setdefault(room, []).append(samples)
            rooms |= 1 << room

    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    for piece, (first, last) in zip((-sizes).tolist(), pairwise([*firsts.tolist(), len(order)]), strict=True):
        left = order[first:last]
        while len(left):
            if enough := rooms >> piece:
                room = piece + (enough & -enough).bit_length() - 1
                samples = np.concatenate(free.pop(room))
                rooms ^= 1 << room
            else:
                room = size
                samples = np.arange(total, total - -len(left) // (size // piece))
                total += len(samples)
            each = room // piece
            taken = left[: len(samples) * each]
            found[taken] = np.repeat(samples, each)[: len(taken)]
            whole, rest = divmod(len(taken), each)
            put_back(room - each * piece, samples[:whole])
            if rest:
                put_back(room - rest * piece, samples[whole : whole + 1])
            put_back(room, samples[whole + bool(rest) :])
            left = left[len(taken) :]
    return found
