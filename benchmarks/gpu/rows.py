"""A line of the table: what was looked at, what it was to be, what was seen, the verdict, and the bare figures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from processes import Failed

OK, BELOW, FAILED, LEFT_OUT, NO_TIME, SEEN = "ok", "below its aim", "failed", "left out", "no time", "no aim"
COLUMNS = ("part", "what", "aim", "seen", "verdict")


class Row(NamedTuple):
    """Of the table."""

    part: str
    what: str
    aim: str
    seen: str
    verdict: str
    figures: dict[str, Any] = {}  # noqa: RUF012  never changed


def judged(part: str, what: str, aim: str, seen: str, *, good: bool | None, **figures: Any) -> Row:  # noqa: ANN401
    """None: there is no aim here."""
    verdict = SEEN if good is None else OK if good else BELOW
    return Row(part, what, aim if good is not None else "", seen, verdict, figures)


def left_out(part: str, what: str, why: str) -> Row:
    """What this machine or Python lacks."""
    return Row(part, what, "", why, LEFT_OUT)


def no_time(part: str, what: str) -> Row:
    """What the suite's minutes were too few for."""
    return Row(part, what, "", "no time was left for it", NO_TIME)


def tried(part: str, what: str, look: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """What it sees, and how it ended if not well: what comes after it is looked at all the same."""
    try:
        yield from look()
    except Failed as failed:
        yield Row(part, what, "", str(failed), FAILED)


def table(rows: list[Row]) -> str:
    """Markdown that reads well in a terminal, too."""
    cells = [COLUMNS, *(tuple(cell.replace("|", "/") for cell in row[:5]) for row in rows)]
    widths = [min(60, max(len(row[column]) for row in cells)) for column in range(5)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


class Results:
    """All rows so far, on stdout and in two files: the machine may be taken away at any second.

    page.md is of this command alone; figures.jsonl keeps the lines of those before.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self.page = folder / "page.md"
        self._lines = folder / "figures.jsonl"
        self.page.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Print it, append it to figures.jsonl, and write page.md anew."""
        self.rows.append(row)
        print(" | ".join(row[:5]), flush=True)
        line = {**row._asdict(), "time": round(datetime.now(UTC).timestamp(), 1)}
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        text = (
            f"# dray on a GPU, {datetime.now(UTC):%Y-%m-%d}\n\n`python3 benchmarks/gpu`. "
            f"`docs/gpu.md` says what each part looks at.\n\n{table(self.rows)}\n"
        )
        part = self.page.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(self.page)
