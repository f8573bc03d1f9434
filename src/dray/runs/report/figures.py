"""Plots as HTML and SVG, without scripts, for any width, in light and dark colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from xml.etree.ElementTree import Element

from dray.runs.report import axis
from dray.runs.report.axis import Axis
from dray.runs.report.document import Lines, Point, Series, Spans
from dray.runs.report.markup import folded, table, tag
from dray.runs.report.numbers import figure, seconds

_SIZE = 1000  # of a drawing, which CSS stretches
_COLOURS = 8
_PLACES, _ROWS = 80, 40  # places of a curve with numbers under the pointer, and rows of its table


def lines(plot: Lines, colours: Sequence[str] = ()) -> Element:
    """Curves; a name in `colours` gets the colour of its position there."""
    across = axis.of([x for one in plot.series for x, _ in one.points], tight=True)
    up = axis.of([y for one in plot.series for _, y in one.points], from_zero=plot.from_zero)
    names = {one.name: _colour(colours.index(one.name) if one.name in colours else number)
             for number, one in enumerate(plot.series)}  # fmt: skip
    # Lower curves are wider, so that all curves of equal losses are visible.
    wide = [1.75 + 2 * min(3, len(plot.series) - place) for place in range(1, len(plot.series) + 1)]
    drawn = [_curve(one, across, up, names[one.name], px) for one, px in zip(plot.series, wide, strict=True)]
    where = [(across.share(x), name) for x, name in plot.marks]
    marks = [_line([(share * _SIZE, 0), (share * _SIZE, _SIZE)], "mark") for share, _ in where]
    grid = [_line([(0, y), (_SIZE, y)], "grid") for tick, _ in up.ticks for y in [(1 - up.share(tick)) * _SIZE]]
    numbers = [tag("b", str(n), style=f"left:{share:.2%}") for n, (share, _) in enumerate(where, 1)]
    plane = tag("div", _drawing(*grid, *marks, *drawn), *numbers, _readout(plot, across), *_labels(up, "up"),
                *_labels(across, "across"), class_="plane")  # fmt: skip
    head = (plot.x, *(one.name for one in plot.series))
    rows = tuple((figure(x), *("" if y is None else figure(y, 5) for y in values))
                 for x, values in axis.sampled(plot.series, across, _ROWS))  # fmt: skip
    return _figure(
        plot.title, plot.alt, _legend(names.items()) if len(names) > 1 else None,
        tag("p", plot.y, class_="unit"), _image(plot.alt or plot.title, plane), tag("p", plot.x, class_="unit across"),
        _listed([name for _, name in plot.marks]),
        folded("Numbers", table(f"{plot.title}: numbers of the plot", head, rows)),
    )  # fmt: skip


def spans(plot: Spans) -> Element:
    """A time line."""
    across = axis.of_seconds(max((span.end for _, row in plot.rows for span in row), default=1.0))
    names: dict[str, str] = {}
    for span in (span for _, row in plot.rows for span in row):
        names.setdefault(span.name, _colour(len(names)))
    rows: list[Element] = []
    for place, (name, row) in enumerate(plot.rows):
        parts = [
            tag("i", class_=names[span.name], title=f"{span.name}: {seconds(span.end - span.begin)}",
                style=f"left:{begin:.2%};width:{across.share(span.end) - begin:.2%}")
            for span in row for begin in [across.share(span.begin)]
        ]  # fmt: skip
        faults = [tag("b", str(n), style=f"left:{across.share(time):.2%}")
                  for n, (of, time, _) in enumerate(plot.marks, 1) if of == place]  # fmt: skip
        rows += [tag("span", name, class_="name"), tag("div", *parts, *faults, class_="strip bar")]
    rows += [tag("span"), tag("div", *_labels(across, "across"), class_="strip axis")]
    numbers = tuple((name, span.name, seconds(span.begin), seconds(span.end - span.begin))
                    for name, row in plot.rows for span in row)  # fmt: skip
    head = ("attempt", "part", "began after", "took")
    return _figure(
        plot.title, plot.alt, _legend(names.items()), _image(plot.alt or plot.title, tag("div", *rows, class_="rows")),
        _listed([what for _, _, what in plot.marks]), folded("Numbers", table(f"{plot.title}: numbers", head, numbers)),
    )  # fmt: skip


def _figure(title: str, alt: str, *inside: Element | None) -> Element:
    told = tag("p", alt, class_="alt") if alt else None
    return tag("figure", tag("figcaption", title), *inside[:-1], told, inside[-1])


def _image(alt: str, inside: Element) -> Element:
    """One picture for screen readers; its numbers are in the table below."""
    return tag("div", inside, role="img", aria_label=alt)


def _drawing(*inside: Element) -> Element:
    return tag("svg", *inside, viewBox=f"0 0 {_SIZE} {_SIZE}", preserveAspectRatio="none", aria_hidden="true")


def _line(points: Sequence[Point], kind: str, style: str | None = None) -> Element:
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=kind, style=style)


def _curve(one: Series, across: Axis, up: Axis, colour: str, wide: float) -> Element:
    at = [(across.share(x) * _SIZE, (1 - up.share(y)) * _SIZE) for x, y in one.points]
    if one.dots or len(at) == 1:  # a line of no length with round ends is a dot at any aspect ratio
        path = " ".join(f"M{x:.1f},{y:.1f}h0" for x, y in at)
        return tag("path", d=path, class_=f"dots {colour}")
    return _line(at, f"curve {colour}", f"stroke-width:{wide}px")


def _labels(of: Axis, kind: str) -> Iterator[Element]:
    side = "left" if kind == "across" else "bottom"
    for tick, shown in of.ticks:
        yield tag("span", shown, class_=f"tick {kind}", style=f"{side}:{of.share(tick):.2%}")


def _readout(plot: Lines, across: Axis) -> Element:
    """The numbers under the pointer, without a script."""
    columns = []
    found = {min(_PLACES - 1, int(across.share(x) * _PLACES)): (x, values)
             for x, values in axis.sampled(plot.series, across, _PLACES)}  # fmt: skip
    for place in range(_PLACES):
        text = None
        if place in found:
            x, values = found[place]
            told = [f"{one.name} {figure(y, 4)}" if len(plot.series) > 1 else figure(y, 4)
                    for one, y in zip(plot.series, values, strict=True) if y is not None]  # fmt: skip
            text = tag("span", f"{plot.x} {figure(x)}: {', '.join(told)}")
        columns.append(tag("i", text))
    return tag("div", *columns, class_="readout")


def _colour(number: int) -> str:
    """The CSS classes of a colour: eight colours, then the same dashed and dotted."""
    return f"c{number % _COLOURS} d{number // _COLOURS % 3}"


def _legend(names: Iterable[tuple[str, str]]) -> Element:
    key = [tag("li", tag("i", class_=colour), name) for name, colour in names]
    return tag("ul", *key, class_="legend")


def _listed(marks: Sequence[str]) -> Element | None:
    return tag("ol", *(tag("li", name) for name in marks), class_="marks") if marks else None
