"""HTML as a tree: what a run folder says can only ever be text in it."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from dray.contract.values import printable

Child = Element | str | None


def tag(name: str, *children: Child, **attributes: object) -> Element:
    """An element. `class_` is the attribute class, `aria_label` aria-label; None is left out."""
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
    """As HTML."""
    return tostring(element, encoding="unicode", method="html")


def table(caption: str, head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Element:
    """With a scope for each head, in a region that can be scrolled by keyboard where it is too wide."""
    columns = tag("tr", *(tag("th", name, scope="col") for name in head))
    body = (tag("tr", *(tag("td", cell) if place else tag("th", cell, scope="row") for place, cell in enumerate(row)))
            for row in rows)  # fmt: skip
    kind = "pairs" if len(head) == 2 else None  # two columns fit a phone; more are scrolled
    made = tag("table", tag("caption", caption), tag("thead", columns), tag("tbody", *body), class_=kind)
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex=0)


def folded(summary: str, inside: Element) -> Element:
    """Shown when it is asked for."""
    return tag("details", tag("summary", summary), inside)
