"""A mix of datasets: how the samples of a block are shared out by weight."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

BLOCK = 1024
"""The samples of a block, in which every dataset has its share."""


def quotas(size: int, weights: Sequence[float]) -> list[int]:
    """Share out `size` samples by weight, the rest to the largest remainders. Exact, so the same on every machine."""
    parts = [Fraction(weight) for weight in weights]
    exact = [size * part / sum(parts) for part in parts]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (shares[source] - exact[source], source))
    for source in by_remainder[: size - sum(shares)]:
        shares[source] += 1
    return shares


def is_too_light(weight: float, weights: Sequence[float]) -> bool:
    """Whether a weight gives less than one sample of a block, so that its dataset may never be read."""
    return BLOCK * Fraction(weight) < sum(map(Fraction, weights))
