"""HTML as a tree, in which content of a run folder can only be text."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from dray.contract.control_characters import printable

Child = Element | str | None


def tag(name: str, *children: Child, **attributes: object) -> Element:
    """An element. `class_` is the attribute class, `aria_label` is aria-label; attributes with None are left out."""
    made = Element(name, {
        key.rstrip("_").replace("_", "-"): printable(str(value))
        for key, value in attributes.items() if value is not None
    })  # fmt: skip
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif child and len(made):
            made[-1].tail = (made[-1].tail or "") + printable(child)
        elif child:
            made.text = (made.text or "") + printable(child)
    return made


def serialized(element: Element) -> str:
    """The element as HTML."""
    return tostring(element, encoding="unicode", method="html")


def table(caption: str, head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Element:
    """A table with header scopes, in a region that scrolls by keyboard."""
    columns = tag("tr", *(tag("th", name, scope="col") for name in head))
    body = (tag("tr", *(tag("td", cell) if place else tag("th", cell, scope="row") for place, cell in enumerate(row)))
            for row in rows)  # fmt: skip
    kind = "pairs" if len(head) == 2 else None  # two columns fit a phone; more are scrolled
    made = tag("table", tag("caption", caption), tag("thead", columns), tag("tbody", *body), class_=kind)
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex=0)


def folded(summary: str, inside: Element) -> Element:
    """Content that the reader can open."""
    return tag("details", tag("summary", summary), inside)
