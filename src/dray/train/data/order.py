"""Which tokens make which sample: the same on any number of ranks, shuffled, and no token is dropped.

A dataset is read epoch after epoch as one endless row of tokens, cut into samples. What is left over at the end of an
epoch begins the first sample of the next. An epoch's samples are shuffled by a permutation that is computed and never
stored, so that any sample of a dataset of any size is found at once, and resuming costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dray.contract.trainer.dataset import BLOCK, quotas

_ROUNDS = 4
_MASK = (1 << 64) - 1
_BETWEEN_SEEDS = 1_000_003  # without it block n of seed s has the order of block n-1 of seed s+1


@dataclass(frozen=True)
class Order:
    """`total` tokens in samples of `length` tokens; `seed` decides the shuffling."""

    total: int
    length: int
    seed: int

    def first(self, epoch: int) -> int:
        """The first sample that begins in this epoch, and so how many began before it."""
        return -(-epoch * self.total // self.length)

    def start(self, sample: int) -> int:
        """Where in the dataset the sample begins."""
        epoch = sample * self.length // self.total
        first = self.first(epoch)
        count = self.first(epoch + 1) - first
        return (first + permuted(sample - first, count, self.seed + epoch)) * self.length % self.total


class Mix:
    """Several datasets by weight: which dataset a sample is from, and which of its samples it is.

    Samples come in blocks, in each of which every dataset has its quota. A permutation decides the order in a block.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.seed = seed * _BETWEEN_SEEDS
        self.bounds = [0, *accumulate(quotas(BLOCK, weights))]

    def place(self, sample: int) -> tuple[int, int]:
        """The number of the dataset, and of the sample in it."""
        block, turn = divmod(sample, BLOCK)
        place = permuted(turn, BLOCK, self.seed + block)
        dataset = bisect_right(self.bounds, place) - 1
        begin, end = self.bounds[dataset : dataset + 2]
        return dataset, block * (end - begin) + place - begin

    def taken(self, samples: int) -> list[int]:
        """How many of the first samples each dataset gives."""
        block, turn = divmod(samples, BLOCK)
        counts = [block * (end - begin) for begin, end in pairwise(self.bounds)]
        for sample in range(samples - turn, samples):
            dataset, _ = self.place(sample)
            counts[dataset] += 1
        return counts


def permuted(index: int, count: int, seed: int) -> int:
    """The place of `index` in the permutation of `count` items that belongs to this seed.

    A Feistel network over the next power of four, walked until it comes out within the count.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right + (seed << 20) + (turn << 60)) & mask)
        index = (left << half) | right
        if index < count:
            return index


def _mixed(value: int) -> int:
    """Every bit of the value changes about half of the bits of this (the finaliser of SplitMix64)."""
    value = (value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def indices(step: int, micro: int, rank: int, *, world: int, per_device: int, accumulation: int) -> range:
    """One rank's samples in one micro-batch; all ranks and micro-batches of a step make its global batch."""
    base = ((step * accumulation + micro) * world + rank) * per_device
    return range(base, base + per_device)
