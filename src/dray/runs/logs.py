"""The logs of an attempt's nodes and ranks, merged in time order as far as their lines have times."""

from __future__ import annotations

import heapq
import re
import resource
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from dray.contract import files
from dray.runs.follow import Growing
from dray.runs.store import RunPaths, written

_LONGEST = 1 << 16  # bytes of a line; a longer one is shown as several lines
_NAME = re.compile(r"(node|rank|job)-(([0-9]{1,18})(?:_[0-9]{1,18})?)\.log")
_ISO = re.compile(rb"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|\+00:00)?")
_GLOG = re.compile(rb"\[?[IWEF](\d\d)(\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,9})?)")  # torch's own lines
_STEP = re.compile(rb"step (\d{1,18})/\d")
_WRITTEN = re.compile(rb'\{"event": "step", "time": ([0-9.]{1,32}), "step": (\d{1,18})[,}]')
_AHEAD = 64  # steps that a log may leave out
_SLACK_S = 120.0


class Log(Growing):
    """One log file, read from the last position."""

    def __init__(self, label: str, path: Path, kind: str, number: int) -> None:
        super().__init__(path)
        self.label, self.kind, self.number = label, kind, number

    def new(self, *, whole: bool) -> Iterator[bytes]:
        """New lines; an unfinished last line only if this is the `whole` file."""
        with suppress(FileNotFoundError):
            for line in self.lines(_LONGEST, whole=whole):
                yield line.rstrip(b"\n")


def of(paths: RunPaths, *, node: int | None = None, rank: int | None = None, each: int = 1) -> list[Log]:
    """The logs of an attempt, nodes first; or of one rank, or of one node with its ranks. `each`: ranks per node."""
    found = []
    for log in _logs_in(paths.logs):
        on = log.number // each if log.kind == "rank" else log.number
        if node in (None, on) and (rank is None or (log.kind, log.number) == ("rank", rank)):
            found.append(log)
    return found


def of_job(run: Path) -> list[Log]:
    """The logs of submitted jobs, the only output before the first attempt."""
    return _logs_in(run)


def _logs_in(folder: Path) -> list[Log]:
    found = []
    for path in folder.glob("*.log"):
        if name := _NAME.fullmatch(path.name):
            found.append(Log(f"{name[1]} {name[2]}", path, name[1], int(name[3])))
    return sorted(found, key=lambda log: (log.kind, log.number))


def joined(logs: list[Log], paths: RunPaths, *, since: float = 0.0, whole: bool = True) -> Iterator[tuple[Log, bytes]]:
    """All lines in time order. A line without a time follows the line before it in its own log.

    A step's line gets the step's time in the metrics.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a run may have thousands of ranks
    began = written(paths.plan) or 0.0
    steps = _Steps(paths.metrics)
    timed = [_timed(log, began, steps, whole=whole) for log in logs]
    for at, log, line in heapq.merge(*timed, key=lambda line: line[0]):
        if at >= since:
            yield log, line


def new(logs: Iterable[Log]) -> Iterator[tuple[Log, bytes]]:
    """New lines, in the order of the logs."""
    for log in logs:
        with suppress(OSError):
            # First stat: opening a thousand logs five times a second would load a shared disk.
            if log.path.stat().st_size != log.position:
                yield from ((log, line) for line in log.new(whole=False))


def _timed(log: Log, began: float, steps: _Steps, *, whole: bool) -> Iterator[tuple[float, Log, bytes]]:
    """The lines with their times, which never go back."""
    at, place, ended = began, 0, written(log.path) or time.time()
    try:
        for line in log.new(whole=whole):
            if step := _STEP.match(line):
                told, place = steps.find(int(step[1]), place)
            else:
                told = _time_of(line, began - _SLACK_S, ended + _SLACK_S)
            at = max(at, told or at)
            yield at, log, line
    except OSError as error:  # the other logs are still shown
        yield at, log, f"dray: this log cannot be read: {error.strerror}".encode()


def _time_of(line: bytes, first: float, last: float) -> float | None:
    """The time in a line, in this machine's zone or in UTC (an image's zone), whichever is within the attempt."""
    texts: list[str] = []
    if glog := _GLOG.match(line):
        years = {time.gmtime(first).tm_year, time.gmtime(last).tm_year}
        texts = [f"{year}-{glog[1].decode()}-{glog[2].decode()}T{glog[3].decode()}" for year in years]
    elif iso := _ISO.search(line, 0, 80):
        texts = [iso[0].decode().replace("_", "T")]
    for text in texts:
        with suppress(ValueError, OverflowError):
            when = datetime.fromisoformat(text)
            for at in (when.timestamp(), when.replace(tzinfo=UTC).timestamp()):
                if first <= at <= last:
                    return at
    return None


class _Steps:
    """The time of each step in the metrics, in 16 bytes per step."""

    def __init__(self, metrics: Path) -> None:
        self._numbers, self._times = array("q"), array("d")
        with suppress(OSError, ValueError), files.open_regular(metrics) as file:
            for line in file:
                if step := _WRITTEN.match(line):
                    self._numbers.append(int(step[2]))
                    self._times.append(float(step[1]))

    def find(self, step: int, place: int) -> tuple[float | None, int]:
        """The step's time, searched from a place in the metrics, and the next place: a run may repeat steps."""
        with suppress(ValueError):
            at = self._numbers.index(step, place, place + _AHEAD)
            return self._times[at], at + 1
        return None, place
