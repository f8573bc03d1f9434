"""Tables, curves and time lines: what page.html draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dray.contract.findings import measured

MOST = 2000
"""The most points of a curve."""
MISSING = "not measured"
_PLACES = 50  # with numbers, under the pointer and in the table
Point = tuple[float, float]


class Text(NamedTuple):
    """A paragraph."""

    text: str
    style: str = ""
    """`warning`, `failure` or empty."""
    kind: str = "text"


class Table(NamedTuple):
    """A table with a header; the first cell of a row is its name."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    """Whether the page shows only the caption until the reader opens it."""
    kind: str = "table"


class Series(NamedTuple):
    """One curve."""

    name: str
    points: Sequence[Point]
    colour: str


class Axis(NamedTuple):
    """An axis from its lowest to its highest value, with ticks and their labels."""

    least: float
    most: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """The position of a value, from 0 to 1."""
        return min(1.0, max(0.0, (value - self.least) / (self.most - self.least)))


@dataclass(frozen=True)
class Lines:
    """Curves over steps, with marks for events."""

    title: str
    y: str
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    from_zero: bool = False
    dots: bool = False
    kind: str = "lines"

    @property
    def across(self) -> Axis:
        steps = [step for series in self.series for step, _ in series.points]
        return axis(min(steps), max(steps), tight=True)

    @property
    def up(self) -> Axis:
        values = [value for series in self.series for _, value in series.points]
        return axis(0.0 if self.from_zero else min(values), max(values))

    @property
    def places(self) -> list[tuple[float, list[float | None]] | None]:
        """For equal parts of the axis the last step and each curve's last value; None where no curve has a point."""
        across = self.across
        places: list[tuple[float, list[float | None]] | None] = [None] * _PLACES
        for column, series in enumerate(self.series):
            for step, value in series.points:
                place = min(_PLACES - 1, int(across.share(step) * _PLACES))
                last, values = places[place] or (step, [None] * len(self.series))
                values[column] = value
                places[place] = (max(step, last), values)
        return places

    @property
    def alt(self) -> str:
        """The curves in words."""
        return " ".join(f"{self.title}, {series.name}: {_course(series.points)}." for series in self.series)


def _course(points: Sequence[Point]) -> str:
    least, most = (choose(points, key=_value) for choose in (min, max))
    first, last, low, high = (
        f"{figure(value, 4)} at step {step:,.0f}" for step, value in (points[0], points[-1], least, most)
    )
    return f"{first}, {last}, minimum {low}, maximum {high}"


class Span(NamedTuple):
    """A bar in a time line, in seconds."""

    begin: float
    end: float
    name: str

    @property
    def took(self) -> str:
        """How long it was."""
        return measured(self.end - self.begin)


@dataclass(frozen=True)
class TimeLine:
    """Rows of bars, each with its name."""

    title: str
    rows: Sequence[tuple[str, Sequence[Span]]]
    kind: str = "time line"

    @property
    def across(self) -> Axis:
        return axis(0.0, max(span.end for _, row in self.rows for span in row), tight=True)

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each part."""
        names = dict.fromkeys(span.name for _, row in self.rows for span in row)
        return {name: colour(place) for place, name in enumerate(names)}

    @property
    def alt(self) -> str:
        """The bars in words."""
        rows = (f"{name}: {', '.join(f'{span.name} {span.took}' for span in row)}" for name, row in self.rows)
        return f"{self.title}. {'; '.join(rows)}."


def axis(least: float, most: float, *, tight: bool = False) -> Axis:
    """An axis for values between these, which ends at ticks unless `tight`."""
    if not most > least:
        spread = abs(least) or 1.0
        least, most = least - spread / 2, least + spread / 2
    rough = (most - least) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
    ticks = [place * step for place in range(math.floor(least / step), math.ceil(most / step) + 1)]
    if tight:
        ticks = [tick for tick in ticks if least <= tick <= most]
    else:
        least, most = ticks[0], ticks[-1]
    digits = max(0, -math.floor(math.log10(step)))
    labels = [f"{tick:,.{digits}f}" if digits < 6 and abs(tick) < 1e9 else f"{tick:.3g}" for tick in ticks]
    return Axis(least, most, [*zip(ticks, labels, strict=True)])


def reduced(points: Sequence[Point]) -> Sequence[Point]:
    """At most MOST points: of equal parts of the curve the lowest and the highest value, so that peaks remain."""
    if len(points) <= MOST:
        return points
    length = math.ceil(len(points) / (MOST // 2 - 1))
    kept = {points[0], points[-1]}
    for begin in range(0, len(points), length):
        part = points[begin : begin + length]
        kept |= {min(part, key=_value), max(part, key=_value)}
    return sorted(kept)


def _value(point: Point) -> float:
    return point[1]


def colour(place: int) -> str:
    """The CSS classes of a colour: eight colours, then the same dashed and dotted."""
    return f"c{place % 8} d{place // 8 % 3}"


def figure(value: float | None, digits: int = 0) -> str:
    """The number with at most `digits` decimals; fewer in large numbers, three significant digits in small ones."""
    if value is None:
        return MISSING
    size = abs(value)
    if size >= 1e15 or 0 < size < 10.0 ** -max(digits, 1):
        return f"{value:.3g}"
    return f"{value:,.{max(0, digits - len(f'{size:.0f}') + 1)}f}"


def seconds(value: float | None, none: str = MISSING) -> str:
    """A measured time."""
    return none if value is None else measured(value)
