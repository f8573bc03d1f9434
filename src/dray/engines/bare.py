"""No container: the machine's own Python, for the demo and for machines without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from dray.engines.words import Word
from dray.plan import Plan


def argv(_plan: Plan, inner: Sequence[str]) -> list[Word]:
    """The inner command itself."""
    return list(inner)
