"""Curves and time lines for a page: which points, ticks, colours and numbers it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dray.runs.stages import measured

MOST = 2000
"""The most points of a curve."""
MISSING = "not measured"
_PLACES = 50  # with numbers, under the pointer and in the table
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
Marks = Sequence[tuple[str, str]]
"""Places on the axis and events."""


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
    steps: Sequence[float]
    values: Sequence[float]


class Span(NamedTuple):
    """A bar in a time line, in seconds."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve as a page draws it in a square of 1000."""

    colour: str
    width: float
    points: str
    dots: bool


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves, or rows of bars, with all that stands around them. Places are percents of the axis."""

    kind: str
    title: str
    alt: str
    legend: Sequence[tuple[str, str]]
    """Names with their colours."""
    across: Sequence[tuple[str, str]]
    """The ticks of the axis with their labels."""
    marks: Sequence[str]
    """What the numbers on the plot mean."""
    numbers: Table
    y: str = ""
    up: Sequence[tuple[str, str]] = ()
    curves: Sequence[Curve] = ()
    flags: Marks = ()
    readout: Sequence[str] = ()
    """The numbers under the pointer, for equal parts of the axis."""
    rows: Sequence[tuple[str, Sequence[tuple[str, str, str, str]], Marks]] = ()
    """Each row's name, its bars (place, width, colour, title) and its marks."""


@dataclass(frozen=True)
class Axis:
    """An axis from its lowest to its highest value, with ticks and their labels."""

    least: float
    most: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """The position of a value, from 0 to 1."""
        return min(1.0, max(0.0, (value - self.least) / (self.most - self.least)))

    def labels(self) -> list[tuple[str, str]]:
        """The ticks' places and labels."""
        return [(f"{self.share(tick):.2%}", label) for tick, label in self.ticks]


def axis(least: float, most: float, *, from_zero: bool = False, tight: bool = False) -> Axis:
    """An axis for values between these, which ends at ticks unless `tight`."""
    least = 0.0 if from_zero else least
    if not most > least:
        spread = abs(least) or 1.0
        least, most = (0.0, spread * 2) if from_zero else (least - spread / 2, least + spread / 2)
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


def reduced(steps: Sequence[float], values: Sequence[float], most: int = MOST) -> list[tuple[float, float]]:
    """At most `most` points: from equal parts of the curve the lowest and the highest value, so that peaks remain."""
    if len(values) <= most:
        return [*zip(steps, values, strict=True)]
    parts = most // 2 - 1
    edges = [1 + (len(values) - 2) * part // parts for part in range(parts + 1)]
    places = {0, len(values) - 1}
    for begin, end in pairwise(edges):
        part = values[begin:end]
        places |= {begin + part.index(min(part)), begin + part.index(max(part))}
    return [(steps[place], values[place]) for place in sorted(places)]


def curves(
    title: str, y: str, series: Sequence[Series], what: str = "", *, marks: Sequence[tuple[float, str]] = (),
    from_zero: bool = False, dots: bool = False, names: Sequence[str] = (),
) -> Plot:  # fmt: skip
    """Curves over steps, each with its own colour: of the place that its name has in `names`, or of its own."""
    colours = [colour(names.index(one.name) if names else place) for place, one in enumerate(series)]
    drawn = [reduced(one.steps, one.values) for one in series]
    steps = [step for points in drawn for step, _ in points]
    values = [value for points in drawn for _, value in points]
    across, up = axis(min(steps), max(steps), tight=True), axis(min(values), max(values), from_zero=from_zero)
    found = []
    for place, points in enumerate(drawn):
        at = [f"{across.share(x) * 1000:.1f},{(1 - up.share(value)) * 1000:.1f}" for x, value in points]
        # Lower curves are wider, so that all curves of equal losses are visible.
        width = 1.75 + 2 * min(3, len(series) - place - 1)
        alone = dots or len(at) == 1  # a line of no length with round ends is a dot at any aspect ratio
        joined = "".join(f"M{point}h0" for point in at) if alone else " ".join(at)
        found.append(Curve(colour=colours[place], width=width, points=joined, dots=alone))
    parts = [_parts(points, across) for points in drawn]
    rows, readout = [], []
    for place in range(_PLACES):
        cells = [part.get(place) for part in parts]
        known = [(one.name, cell) for one, cell in zip(series, cells, strict=True) if cell]
        if not known:
            readout.append("")
            continue
        step = figure(max(cell[0] for _, cell in known))
        rows.append((step, *(figure(cell[1], 5) if cell else "" for cell in cells)))
        texts = [f"{name} {figure(cell[1], 4)}" if len(series) > 1 else figure(cell[1], 4) for name, cell in known]
        readout.append(f"step {step}: {', '.join(texts)}")
    told = []
    for one, points in zip(series, drawn, strict=True):
        of = f" of {one.name}" if len(series) > 1 else ""
        told.append(f"{what or title}{of}: {_course(points)}.")
    return Plot(
        kind="curves", title=title, alt=" ".join(told), y=y, across=across.labels(), up=up.labels(), curves=found,
        legend=[(one.name, shown) for one, shown in zip(series, colours, strict=True)] if len(series) > 1 else [],
        flags=[(f"{across.share(step):.2%}", name) for step, name in marks], marks=[name for _, name in marks],
        readout=readout, numbers=Table(f"{title}: numbers of the plot", ("step", *(one.name for one in series)), rows),
    )  # fmt: skip


def _parts(points: Sequence[tuple[float, float]], across: Axis) -> dict[int, tuple[float, float]]:
    """The last point in each part of the axis that has one."""
    return {min(_PLACES - 1, int(across.share(step) * _PLACES)): (step, value) for step, value in points}


def _course(points: Sequence[tuple[float, float]]) -> str:
    def at(point: tuple[float, float]) -> str:
        return f"{figure(point[1], 4)} at step {point[0]:,.0f}"

    least, most = (choose(points, key=lambda point: point[1]) for choose in (min, max))
    return f"{at(points[0])}, {at(points[-1])}, minimum {at(least)}, maximum {at(most)}"


def time_line(
    title: str, rows: Sequence[tuple[str, Sequence[Span]]], marks: Sequence[tuple[int, float, str]] = (), told: str = ""
) -> Plot:
    """Rows of bars over one clock; each row begins at its own time, and marks have their row and time."""
    most = max((span.end for _, row in rows for span in row), default=1.0)
    unit, name = next(((size, name) for size, name in _UNITS if most >= 2 * size), (1.0, "s"))
    inner = axis(0.0, max(most, 1e-3) / unit, tight=True)
    names = list(dict.fromkeys(span.name for _, row in rows for span in row))
    drawn, numbers, texts = [], [], []
    for place, (row, spans) in enumerate(rows):
        bars = []
        for span in spans:
            took = measured(span.end - span.begin)
            begin, end = inner.share(span.begin / unit), inner.share(span.end / unit)
            bars.append((f"{begin:.2%}", f"{end - begin:.2%}", colour(names.index(span.name)), f"{span.name}: {took}"))
            numbers.append((row, span.name, measured(span.begin), took))
        flags = [
            (f"{inner.share(at / unit):.2%}", str(count)) for count, (of, at, _) in enumerate(marks, 1) if of == place
        ]
        drawn.append((row, bars, flags))
        texts.append(f"{row}: {', '.join(f'{span.name} {measured(span.end - span.begin)}' for span in spans)}")
    return Plot(
        kind="time_line", title=title, alt=f"{title}{told}. {'; '.join(texts)}.", rows=drawn,
        legend=[(name, colour(place)) for place, name in enumerate(names)],
        across=[(place, f"{label} {name}") for place, label in inner.labels()], marks=[what for _, _, what in marks],
        numbers=Table(f"{title}: numbers", ("attempt", "part", "began after", "took"), numbers),
    )  # fmt: skip


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
