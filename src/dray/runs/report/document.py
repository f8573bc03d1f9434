"""The parts of a report: sections with sentences, tables and plots."""

from __future__ import annotations

from dataclasses import dataclass, field

Point = tuple[float, float]
MISSING = "not measured"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = ""
    """`warning`, `failure` or empty."""


@dataclass(frozen=True)
class Table:
    """A table with a header; the first cell of a row is its name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False
    """Whether the page shows only the caption until the reader opens it."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: tuple[Point, ...]
    dots: bool = False
    """Whether to draw single points instead of a line."""


@dataclass(frozen=True)
class Lines:
    """Curves over one axis, with marks for events."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()
    from_zero: bool = False
    alt: str = ""


@dataclass(frozen=True)
class Span:
    """A bar in a time line, in seconds from its start."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True)
class Spans:
    """A time line with a row of spans for each name; marks are events in a row."""

    title: str
    rows: tuple[tuple[str, tuple[Span, ...]], ...]
    marks: tuple[tuple[int, float, str], ...] = ()
    """Row, time and event."""
    alt: str = ""


Item = Text | Table | Lines | Spans


@dataclass(frozen=True)
class Section:
    """A heading with its content."""

    heading: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Document:
    """The whole report."""

    title: str
    lead: tuple[Text, ...]
    sections: tuple[Section, ...] = field(default=())
    names: tuple[str, ...] = ()
    """The runs in the order of their colours."""
    made: str = ""
