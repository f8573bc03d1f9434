"""Axes with their ticks and labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dray.runs.report.document import Point, Series

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class Axis:
    """An axis from its lowest to its highest value."""

    least: float
    most: float
    ticks: tuple[tuple[float, str], ...]
    """Values and their labels."""

    def share(self, value: float) -> float:
        """The position of a value, from 0 to 1."""
        return min(1.0, max(0.0, (value - self.least) / (self.most - self.least)))


def of(values: Sequence[float], *, about: int = 4, from_zero: bool = False, tight: bool = False) -> Axis:
    """An axis for these values, which ends at ticks unless `tight`."""
    least, most = (0.0 if from_zero else min(values)), max(values)
    if not most > least:
        spread = abs(least) or 1.0
        least, most = (0.0 if from_zero else least - spread / 2), least + spread / 2 + (spread if from_zero else 0.0)
    step = _round((most - least) / about)
    first, last = math.floor(least / step), math.ceil(most / step)
    ticks = [number * step for number in range(first, last + 1)]
    if tight:
        ticks = [tick for tick in ticks if least <= tick <= most]
    else:
        least, most = ticks[0], ticks[-1]
    digits = max(0, -math.floor(math.log10(step)))
    shown = [f"{tick:,.{digits}f}" if digits < 6 and abs(tick) < 1e9 else f"{tick:.3g}" for tick in ticks]
    return Axis(least, most, tuple(zip(ticks, shown, strict=True)))


def of_seconds(most: float) -> Axis:
    """An axis from 0, in a readable unit of time."""
    unit, name = next(((size, name) for size, name in _UNITS if most >= 2 * size), (1.0, "s"))
    axis = of([0.0, max(most, 1e-3) / unit], tight=True)
    return Axis(0.0, max(most, 1e-3), tuple((tick * unit, f"{shown} {name}") for tick, shown in axis.ticks))


def _round(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= step * (1 - 1e-9))


def sampled(series: Sequence[Series], axis: Axis, most: int) -> list[tuple[float, tuple[float | None, ...]]]:
    """The curves' last values at `most` places of the axis, or at all their points if these are fewer."""
    places = sorted({x for one in series for x, _ in one.points})
    rows: dict[int, tuple[float, list[float | None]]] = {}
    exact = {x: number for number, x in enumerate(places)} if len(places) <= most else {}

    def part(point: Point) -> int:
        return exact[point[0]] if exact else min(most - 1, int(axis.share(point[0]) * most))

    for column, one in enumerate(series):
        for point in one.points:
            found = rows.setdefault(part(point), (point[0], [None] * len(series)))
            found[1][column] = point[1]
            rows[part(point)] = (max(found[0], point[0]), found[1])
    return [(x, tuple(values)) for _, (x, values) in sorted(rows.items())]
