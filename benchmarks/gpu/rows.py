"""A line of the table: what was looked at, what it was to be, what was seen, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from processes import Failed

OK, BELOW, FAILED, LEFT_OUT, SEEN = "ok", "below its aim", "failed", "left out", "no aim"


class Row(NamedTuple):
    """Of the table."""

    part: str
    what: str
    aim: str
    seen: str
    verdict: str


def judged(part: str, what: str, aim: str, seen: str, *, good: bool | None) -> Row:
    """None: there is no aim here."""
    return Row(part, what, aim if good is not None else "", seen, SEEN if good is None else OK if good else BELOW)


def left_out(part: str, what: str, why: str) -> Row:
    """What this machine or Python lacks."""
    return Row(part, what, "", why, LEFT_OUT)


def tried(part: str, what: str, look: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """What it sees, and how it ended if not well: what comes after it is looked at all the same."""
    try:
        yield from look()
    except Failed as failed:
        yield Row(part, what, "", str(failed), FAILED)


def table(rows: list[Row]) -> str:
    """Markdown that reads well in a terminal, too."""
    cells = [Row._fields, *(tuple(cell.replace("|", "/") for cell in row) for row in rows)]
    widths = [min(60, max(len(row[column]) for row in cells)) for column in range(5)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
