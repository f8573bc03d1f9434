"""Read metrics.jsonl, also if it is half-written, damaged or missing. Schema: docs/reference/metrics.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dray.contract import files
from dray.contract.findings import counted
from dray.runs.follow import Growing
from dray.runs.reading import RECORD, dig

Event = dict[str, Any]
_STEP = b'{"event": "step", '
_FEW, _TAIL = 1 << 13, 1 << 16  # bytes of the end that is read
_KEPT = 4096


class Metrics:
    """The events of one attempt in order, without an unfinished last line."""

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
        """Warnings about damaged lines in the last read."""
        return [f"{self._path}: {counted(self._damaged, 'damaged line')} left out"] if self._damaged else []


def tail(path: Path) -> list[Event]:
    """The events at the end of the file."""
    return list(filter(None, map(parsed, _end(path, _TAIL).split(b"\n"))))


def last_step(path: Path | str) -> Event:
    """The last step in the file; empty if there is none. Only the file's end is read, because lists have thousands of
    runs."""
    for most in (_FEW, _TAIL, _TAIL + RECORD):
        end = _end(path, most)
        found, begin = len(end), b'\n{"event": "step",'
        while (found := end.rfind(begin, 0, found)) >= 0:
            if event := parsed(end[found + 1 :].partition(b"\n")[0]):
                return event
    return {}


def first(path: Path | str) -> Event:
    """The first event of the file."""
    with suppress(FileNotFoundError), files.open_regular(path) as file:
        return parsed(file.readline(RECORD)) or {}
    return {}


def _end(path: Path | str, most: int) -> bytes:
    """The end of the file, from the beginning of a line; a step of thousands of nodes makes a very long line."""
    with suppress(FileNotFoundError):
        for much in (most, _TAIL + RECORD):
            end, whole = files.end(path, much)
            if whole:
                return b"\n" + end
            if b"\n" in end[:-1]:
                return end[end.find(b"\n") :]
    return b""


class Rare:
    """The events of a growing file except steps, whose lines (up to a million) are not parsed. Each look reads only
    what is new."""

    def __init__(self, path: Path) -> None:
        self._file, self._again = Growing(path), 0
        self.events: deque[Event] = deque(maxlen=_KEPT)
        self.first: dict[str, Event] = {}
        """The first start event and the first step event."""

    def look(self) -> None:
        """Read new lines. Raises OSError if the file cannot be read; a missing file has no events."""
        with suppress(FileNotFoundError):
            for line in self._file.lines(RECORD):
                self._renew()
                if not line.startswith(_STEP):
                    if event := parsed(line):
                        self.events.append(event)
                        if event.get("event") == "start":
                            self.first.setdefault("start", event)
                elif "step" not in self.first and (event := parsed(line)):
                    self.first["step"] = event
        self._renew()

    def _renew(self) -> None:
        """Forget the events if the file was replaced."""
        if self._again != self._file.again:
            self._again = self._file.again
            self.events.clear()
            self.first.clear()


def rare(path: Path) -> Iterator[Event]:
    """All events except steps."""
    read = Rare(path)
    read.look()
    yield from read.events


def parsed(line: bytes) -> Event | None:
    """The event of a line; None if it is damaged."""
    try:
        event = from_json(line)  # pydantic's parser is three times as fast as json's, and its floats are bit-identical
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def whole(event: Event, name: str) -> int | None:
    """The value as a count; None if it is none."""
    value = dig(event, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def number(event: Event, name: str) -> float | None:
    """The value as a finite number; None if it is none."""
    value = dig(event, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if -1e300 < value < 1e300 else None  # neither NaN nor infinite
