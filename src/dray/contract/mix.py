"""A mix of datasets: how the samples of a block are shared out by weight."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

BLOCK = 1024
"""Samples in which every source has its share."""


def quotas(size: int, weights: Sequence[float]) -> list[int]:
    """`size` samples by weight, and what is left over to the largest remainders. Exact, so the same everywhere."""
    parts = [Fraction(weight) for weight in weights]
    exact = [size * part / sum(parts) for part in parts]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (found[source] - exact[source], source))
    for source in by_remainder[: size - sum(found)]:
        found[source] += 1
    return found


def is_too_light(weight: float, weights: Sequence[float]) -> bool:
    """Whether this one of the weights is less than one sample of a block, so that there might never be any."""
    return BLOCK * Fraction(weight) < sum(map(Fraction, weights))
