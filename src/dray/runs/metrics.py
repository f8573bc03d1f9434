"""Read metrics.jsonl, also if it is half-written, damaged or missing. Schema: docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dray.contract import files
from dray.contract.findings import counted
from dray.runs.store import dig

Event = dict[str, Any]
LONGEST = 1 << 20
"""Bytes of a line: a step of thousands of nodes makes a very long one."""
_TAIL = 1 << 16


class Metrics:
    """The events of one attempt in order, without an unfinished last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damaged = 0

    def __iter__(self) -> Iterator[Event]:
        self._damaged = 0
        with suppress(FileNotFoundError), files.open_regular(self._path) as file:
            while line := file.readline(LONGEST):
                if event := parsed(line):
                    yield event
                else:
                    self._damaged += line.endswith(b"\n") or len(line) == LONGEST

    def warnings(self) -> list[str]:
        """Warnings about damaged lines in the last read."""
        return [f"{self._path}: {counted(self._damaged, 'damaged line')} left out"] if self._damaged else []


def tail(path: Path, least: int = _TAIL) -> list[Event]:
    """The events of the file's last bytes, of more if there is no step in them. OSError: it cannot be read."""
    events: list[Event] = []
    with suppress(FileNotFoundError):
        for size in (least, _TAIL + LONGEST):
            end, whole = files.end(path, size)
            lines = end.split(b"\n")[0 if whole else 1 :]
            events = [event for event in map(parsed, lines) if event]
            if whole or any(event.get("event") == "step" for event in events):
                break
    return events


def first(path: Path) -> Event:
    """The first event of the file."""
    return next(iter(Metrics(path)), {})


def parsed(line: bytes) -> Event | None:
    """The event of a line; None if it is damaged."""
    try:
        event = from_json(line)  # pydantic's parser is three times as fast as json's, and its floats are bit-identical
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def whole(event: object, name: str) -> int | None:
    """The value as a count; None if it is none."""
    value = dig(event, name)
    return int(value) if isinstance(value, int) and 0 <= value < 1 << 62 else None


def number(event: object, name: str) -> float | None:
    """The value as a finite number; None if it is none."""
    value = event.get(name) if isinstance(event, dict) else None
    return float(value) if isinstance(value, (float, int)) and -1e300 < value < 1e300 else None


_UNSAVED = {"checkpoint": "not saved", "mirror": "not copied"}
WARNED_OF = (*_UNSAVED, "divergence")
"""The kinds of events that `result_warnings` reads."""


def result_warnings(events: Sequence[Event]) -> list[str]:
    """Warnings in metrics: each kind of failed save, and the first loss jumps."""
    found = []
    for kind, what in _UNSAVED.items():
        saves = [event for event in events if event.get("event") == kind]
        failed = [event for event in saves if event.get("saved") is False]
        if failed:
            first_one = f"the first of step {failed[0].get('checkpoint')}: {failed[0].get('why')}"
            mended = "; the last one was saved" if saves[-1].get("saved") is True else ""
            found.append(f"{counted(len(failed), 'checkpoint')} {what}, {first_one}{mended}")
    jumps = [str(event.get("why")) for event in events if event.get("event") == "divergence"]
    return found + jumps[:5]
