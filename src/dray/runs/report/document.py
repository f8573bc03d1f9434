"""What a report is made of: sections of sentences, tables and plots, which HTML and Markdown both write."""

from __future__ import annotations

from dataclasses import dataclass, field

Point = tuple[float, float]
MISSING = "not measured"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = ""
    """`warning` or `failure`, where it is one."""


@dataclass(frozen=True)
class Table:
    """Rows under heads; the first cell of a row is its name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False
    """Whether a page shows only the caption until it is asked for more."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: tuple[Point, ...]
    dots: bool = False
    """Whether the points are few and stand alone."""


@dataclass(frozen=True)
class Lines:
    """Curves over one axis. Marks are events at a place of that axis."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()
    from_zero: bool = False
    alt: str = ""


@dataclass(frozen=True)
class Bars:
    """A histogram: for each name, how many of its values are in each bin."""

    title: str
    x: str
    edges: tuple[float, ...]
    counts: tuple[tuple[str, tuple[int, ...]], ...]
    alt: str = ""


@dataclass(frozen=True)
class Span:
    """A part of a row of a time line, in seconds since its beginning."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True)
class Spans:
    """A time line: for each name, what took how long; marks are events of a row."""

    title: str
    rows: tuple[tuple[str, tuple[Span, ...]], ...]
    marks: tuple[tuple[int, float, str], ...] = ()
    """Row, time, and what happened."""
    alt: str = ""


Item = Text | Table | Lines | Bars | Spans


@dataclass(frozen=True)
class Section:
    """A heading, and what is under it."""

    heading: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Document:
    """The whole report."""

    title: str
    lead: tuple[Text, ...]
    sections: tuple[Section, ...] = field(default=())
    names: tuple[str, ...] = ()
    """The runs, in the order of their colours."""
    made: str = ""
