"""A report as Markdown: sentences, tables, and each plot in words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dray.contract.values import printable
from dray.runs.report.document import Document, Item, Table, Text

_SPECIAL = re.compile(r"([\\`*_\[\]<|#~$&])")
_FIRST = re.compile(r"^(\d+(?=[.)](?: |$)))?([-+=>.)])")  # of a list, a quotation or a rule


def page(document: Document) -> str:
    """The report as Markdown."""
    blocks = [f"# {_plain(document.title)}", *map(_item, document.lead)]
    for section in document.sections:
        blocks += [f"## {section.heading}", *filter(None, map(_item, section.items))]
    return "\n\n".join([*blocks, _plain(document.made)]) + "\n"


def _plain(text: str) -> str:
    """The text in one line, with Markdown and HTML escaped."""
    shown = _SPECIAL.sub(r"\\\1", " ".join(printable(text).split()))
    return _FIRST.sub(r"\1\\\2", shown)


def _item(item: Item) -> str:
    if isinstance(item, Text):
        kind = f"**{item.kind}:** " if item.kind else ""
        return kind + _plain(item.text)
    if isinstance(item, Table):
        return "\n".join(_table(item))
    return _plain(item.alt)


def _table(table: Table) -> Iterator[str]:
    yield f"**{_plain(table.caption)}**\n"
    yield _row(table.head)
    yield _row(("---",) * len(table.head), plain=True)
    yield from map(_row, table.rows)


def _row(cells: tuple[str, ...], *, plain: bool = False) -> str:
    return f"| {' | '.join(cells if plain else map(_plain, cells))} |"
