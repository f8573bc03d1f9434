"""A report as one self-contained HTML page."""

from __future__ import annotations

import html
from importlib import resources
from string import Template
from xml.etree.ElementTree import Element

from dray.contract.control_characters import printable
from dray.runs.report import figures
from dray.runs.report.document import Document, Item, Lines, Section, Spans, Table, Text
from dray.runs.report.markup import folded, serialized, table, tag


def page(document: Document) -> str:
    """The report as HTML."""
    template = resources.files("dray.runs.report").joinpath("page.html").read_text(encoding="utf-8")
    links = (tag("li", tag("a", one.heading, href=f"#{_anchor(one)}")) for one in document.sections)
    header = tag("header", tag("h1", document.title), *(_text(one) for one in document.lead))
    contents = tag("nav", tag("ul", *links), aria_label="Sections")
    main = tag("main", *(_section(one, document.names) for one in document.sections), id="report")
    body = "\n".join(map(serialized, (header, contents, main, tag("footer", tag("p", document.made)))))
    return Template(template).substitute(title=html.escape(printable(document.title)), body=body)


def _anchor(section: Section) -> str:
    return section.heading.lower().replace(" ", "-")


def _section(section: Section, names: tuple[str, ...]) -> Element:
    items = (_item(one, names) for one in section.items)
    anchor = _anchor(section)
    return tag("section", tag("h2", section.heading, id=anchor), *items, aria_labelledby=anchor)


def _item(item: Item, names: tuple[str, ...]) -> Element:
    match item:
        case Text():
            return _text(item)
        case Table():
            made = table(item.caption, item.head, item.rows)
            return folded(item.caption, made) if item.folded else made
        case Lines():
            return figures.lines(item, names)
        case Spans():
            return figures.spans(item)


def _text(text: Text) -> Element:
    return tag("p", text.text, class_=text.kind or None)
