"""Which source of a mix a sample is from, and which of the source's rows it is: both follow from its number.

Samples come in blocks, in each of which every source has its quota. A permutation of seed and block decides the order
in the block, and the place in it is the row: nothing is counted. Blocks are alike until a source ends, and the block in
which it does ends there too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil

from dray.contract.mix import BLOCK, quotas
from dray.train.data.order import permuted

FOREVER = 1 << 62
"""Samples; no run takes so many."""
_BETWEEN_SEEDS = 1_000_003  # else the blocks of one seed were those of the next one, a block later


@dataclass(frozen=True)
class Part:
    """A source: its weight, its number of rows, and the sample of the mix before which it ends."""

    weight: float
    rows: int = FOREVER
    until: int = FOREVER


@dataclass(frozen=True)
class Stretch:
    """Blocks of one size, in which each source has the same quota."""

    begin: int
    """Its first sample."""
    number: int
    """The number of its first block."""
    rows: tuple[int, ...]
    """How many rows each source gave before it."""
    bounds: tuple[int, ...]
    """Where each source's places begin in a block; last, the block's size."""

    def block(self, sample: int) -> tuple[int, int]:
        """The block of a sample, and its turn in that."""
        return divmod(sample - self.begin, self.bounds[-1])

    def place(self, sample: int, seed: int) -> tuple[int, int]:
        """The source of a sample, and which of its rows it is."""
        block, turn = self.block(sample)
        place = permuted(turn, self.bounds[-1], seed + self.number + block)
        source = bisect_right(self.bounds, place) - 1
        begin, end = self.bounds[source : source + 2]
        return source, self.rows[source] + block * (end - begin) + place - begin


class Mix:
    """The order of all samples. `ends` has the sample at which each source has ended; the mix ends with the last."""

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self.seed, self.ends, self.stretches = seed * _BETWEEN_SEEDS, [0] * len(parts), list[Stretch]()
        begin, number, rows = 0, 0, [0] * len(parts)
        while going := {
            source: part for source, part in enumerate(parts) if rows[source] < part.rows and begin < part.until
        }:
            left = min(part.until for part in going.values()) - begin
            room = {source: part.rows - rows[source] for source, part in going.items()}
            weights = {source: part.weight for source, part in going.items()}
            each = dict(zip(going, quotas(BLOCK, [*weights.values()]), strict=True))
            count = min([left // BLOCK, *(room[source] // quota for source, quota in each.items() if quota)])
            if not count:
                each, count = _last(room, weights, min(BLOCK, left)), 1
            taken = [each.get(source, 0) for source in range(len(parts))]
            self.stretches.append(Stretch(begin, number, tuple(rows), (0, *accumulate(taken))))
            rows = [given + count * quota for given, quota in zip(rows, taken, strict=True)]
            begin, number = begin + count * sum(taken), number + count
            for source in going:
                self.ends[source] = begin
        self.end = begin
        self._begins = [stretch.begin for stretch in self.stretches]

    def place(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and which of its rows it is."""
        return self._stretch(sample).place(sample, self.seed)

    def taken(self, samples: int) -> list[int]:
        """How many of the first samples each source gives."""
        stretch = self._stretch(samples)
        block, turn = stretch.block(samples)
        quotas_ = (end - begin for begin, end in pairwise(stretch.bounds))
        found = [before + block * quota for before, quota in zip(stretch.rows, quotas_, strict=True)]
        for sample in range(samples - turn, samples):
            found[stretch.place(sample, self.seed)[0]] += 1
        return found

    def _stretch(self, sample: int) -> Stretch:
        return self.stretches[bisect_right(self._begins, sample) - 1]


def _last(room: dict[int, int], weights: dict[int, float], size: int) -> dict[int, int]:
    """The quotas of a block of at most this size that ends where the first source has given all of its rows."""
    total = sum(map(Fraction, weights.values()))
    size = min([size, *(ceil(rows * total / Fraction(weights[source])) for source, rows in room.items())])
    found = dict.fromkeys(room, 0)
    while size and (more := [source for source in room if found[source] < room[source]]):
        for source, quota in zip(more, quotas(size, [weights[source] for source in more]), strict=True):
            given = min(quota, room[source] - found[source])
            found[source] += given
            size -= given
    return found
