"""metrics.jsonl, read in whatever state it is: half-written, damaged, or not there. docs/metrics.md is its schema."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dray.contract import files
from dray.contract.findings import counted
from dray.runs.records import RECORD

Event = dict[str, Any]
_STEP = b'{"event": "step", '


class Metrics:
    """The events of one attempt, in their order. A line that is still being written is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damaged = 0

    def __iter__(self) -> Iterator[Event]:
        self._damaged = 0
        try:
            file = files.open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            while line := file.readline(RECORD):
                if event := parsed(line):
                    yield event
                else:
                    self._damaged += line.endswith(b"\n") or len(line) == RECORD

    def warnings(self) -> list[str]:
        """What of it could not be read, the last time."""
        return [f"{self._path}: {counted(self._damaged, 'damaged line')} left out"] if self._damaged else []


def last(path: Path, *kinds: str, most: int = 1 << 16) -> Event | None:
    """The newest event of one of these kinds, looked for in the end of the file alone: there may be a million lines."""
    return next((event for event in reversed(tail(path, most=most)) if event.get("event") in kinds), None)


def tail(path: Path, *, most: int = 1 << 16) -> list[Event]:
    """The events in the end of the file."""
    try:
        with files.open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return list(filter(None, map(parsed, file.read(most).split(b"\n"))))
    except FileNotFoundError:
        return []


def rare(path: Path) -> Iterator[Event]:
    """All events that are no steps, of which there may be a million: their lines are not parsed."""
    try:
        file = files.open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(RECORD):
            if not line.startswith(_STEP) and (event := parsed(line)):
                yield event


def parsed(line: bytes) -> Event | None:
    """One line; None where it is damaged."""
    try:
        event = from_json(line)  # pydantic's parser: three times as quick as json's, and floats to the same last bit
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def whole(event: Event, name: str) -> int | None:
    """A count."""
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def number(event: Event, name: str) -> float | None:
    """A number that JSON can hold."""
    value = event.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if -1e300 < value < 1e300 else None  # neither NaN nor infinite
