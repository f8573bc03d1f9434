"""A row of the table, its printer, and a line through what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure: `aim` is the most it may be, and 0 where it has none."""

    name: str
    nodes: int
    value: float
    unit: str
    aim: float = 0

    @property
    def missed(self) -> bool:
        """Whether it is above its aim."""
        return 0 < self.aim < self.value


def show(rows: Iterable[Row]) -> None:
    """Print them."""
    print(f"{'what':<44} {'nodes':>7} {'value':>10} {'unit':<6} aim")
    for row in rows:
        aim = f"< {row.aim:g}{'  MISSED' * row.missed}" if row.aim else ""
        print(f"{row.name:<44} {row.nodes:>7,} {row.value:>10,.3f} {row.unit:<6} {aim}".rstrip(), flush=True)


def fit(points: Sequence[tuple[float, float]]) -> str:
    """`a + b N` by least squares, and R2."""
    start, slope, r2 = line(points)
    return f"{start:.3g} + {slope:.3g} N, R2 = {r2:.4f}"


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """`a`, `b` and R2 of `a + b x` by least squares."""
    count = len(points)
    mean_x, mean_y = (sum(point[axis] for point in points) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    start = mean_y - slope * mean_x
    left = sum((y - start - slope * x) ** 2 for x, y in points)
    whole = sum((y - mean_y) ** 2 for _, y in points)
    return start, slope, 1 - left / whole if whole else 1.0
