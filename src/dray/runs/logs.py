"""The logs of an attempt's nodes and ranks, merged in time order as far as their lines have times."""

from __future__ import annotations

import calendar
import heapq
import re
import resource
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dray.contract import files
from dray.contract.findings import ConfigError, counted
from dray.runs.follow import Growing
from dray.runs.store import RunPaths, written

_LONGEST = 1 << 16  # bytes of a line; a longer one is shown as several lines
_CHUNK = 1 << 20
_NAME = re.compile(r"(node|rank)-([0-9]{1,6})\.log")
_ISO = re.compile(rb"(\d{4})-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|\+00:00)?")
_GLOG = re.compile(rb"\[?[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")  # torch's own lines
_STEP = re.compile(rb"step (\d{1,18})/\d")
_WRITTEN = re.compile(rb'\{"event": "step", "time": ([0-9.]{1,32}), "step": (\d{1,18})[,}]')
_AHEAD = 64
_SLACK_S = 120.0
_SPARE = 64  # open files that are not logs
Joined = tuple[float, "Log", bytes]


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
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in paths.logs.iterdir():
            if not (match := _NAME.fullmatch(path.name)):
                continue
            kind, number = match[1], int(match[2])
            on = number // each if kind == "rank" else number
            if (rank is None or (kind, number) == ("rank", rank)) and node in (None, on):
                found.append(Log(f"{kind} {number}", path, kind, number))
    return sorted(found, key=lambda log: (log.kind == "rank", log.number, log.kind))


def of_job(run: Path) -> list[Log]:
    """The logs of submitted jobs, the only output before the first attempt."""
    return [
        Log(f"job {match[1]}", path, "job", int(match[2]))
        for path in sorted(run.glob("job-*.log"))
        if (match := re.fullmatch(r"job-(([0-9]{1,18})(?:_[0-9]{1,18})?)\.log", path.name))
    ]


def joined(logs: list[Log], paths: RunPaths, *, since: float = 0.0, whole: bool = True) -> Iterator[tuple[Log, bytes]]:
    """All lines in time order. A line without a time follows the line before it in its own log.

    A step's line gets the step's time in the metrics.
    """
    _require(len(logs))
    began = written(paths.plan) or 0.0
    steps = _Steps(paths.metrics)
    for at, log, line in heapq.merge(*(_timed(log, began, steps, whole=whole) for log in logs), key=lambda one: one[0]):
        if at >= since:
            yield log, line


def _timed(log: Log, began: float, steps: _Steps, *, whole: bool) -> Iterator[Joined]:
    clock = _Clock(began, written(log.path) or time.time(), steps)
    try:
        for line in log.new(whole=whole):
            yield clock.of(line), log, line
    except OSError as error:  # the other logs are still shown
        yield began, log, f"dray: this log cannot be read: {error.strerror}".encode()


def new(logs: Iterable[Log]) -> Iterator[tuple[Log, bytes]]:
    """New lines, in the order of the logs."""
    for log in logs:
        with suppress(OSError):
            # First stat: opening a thousand logs five times a second would load a shared disk.
            if log.path.stat().st_size != log.position:
                yield from ((log, line) for line in log.new(whole=False))


class _Clock:
    """The times of one log's lines, which never go back."""

    def __init__(self, began: float, ended: float, steps: _Steps) -> None:
        self._at, self._window = began, (began - _SLACK_S, ended + _SLACK_S)
        self._year = time.gmtime(began).tm_year
        self._steps, self._place = steps, 0

    def of(self, line: bytes) -> float:
        """The time of a line, or of the line before it."""
        told: float | None = None
        if found := _STEP.match(line):
            told, self._place = self._steps.find(int(found[1]), self._place)
        elif found := _GLOG.match(line):
            told = self._of([b"%d" % self._year, *found.groups()])
            told = self._of([b"%d" % (self._year + 1), *found.groups()]) if told is None else told
        elif found := _ISO.search(line, 0, 80):
            told = self._of(list(found.groups()))
        if told is not None:
            self._at = max(self._at, told)
        return self._at

    def _of(self, parts: list[bytes | None]) -> float | None:
        """The time in this machine's zone or in UTC (an image's zone), whichever is within the attempt."""
        year, month, day, hour, minute, second = (int(part or 0) for part in parts[:6])
        fraction = float(b"0." + (parts[6] or b"0"))
        when = (year, month, day, hour, minute, second, -1, -1, -1)
        with suppress(ValueError, OverflowError):
            utc = float(calendar.timegm(when)) + fraction
            zoned = len(parts) > 7 and parts[7]
            for at in (utc,) if zoned else (time.mktime(when) + fraction, utc):
                if self._window[0] <= at <= self._window[1]:
                    return at
        return None


class _Steps:
    """The time of each step from the metrics, read only as far as needed, in 16 bytes per line."""

    def __init__(self, metrics: Path) -> None:
        self._numbers, self._times = array("q"), array("d")
        self._lines = self._read(metrics)

    @staticmethod
    def _read(metrics: Path) -> Iterator[tuple[int, float]]:
        with suppress(OSError, ValueError), files.open_regular(metrics) as file:
            while line := file.readline(_CHUNK):
                if found := _WRITTEN.match(line):
                    yield int(found[2]), float(found[1])

    def find(self, step: int, place: int) -> tuple[float | None, int]:
        """The step's time, searched from a place in the metrics, and the next place: a run may repeat steps."""
        for at in range(place, place + _AHEAD):
            while at >= len(self._numbers):
                number, when = next(self._lines, (-1, 0.0))
                if number < 0:
                    return None, place
                self._numbers.append(number)
                self._times.append(when)
            if self._numbers[at] == step:
                return self._times[at], at + 1
        return None, place


def _require(count: int) -> None:
    """Allow this many open files, or refuse."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE
    if soft != resource.RLIM_INFINITY and wanted > soft:
        if hard != resource.RLIM_INFINITY and wanted > hard:
            raise ConfigError(
                "the run has too many logs to read at once",
                wanted=f"at most {counted(hard - _SPARE, 'log')} (ulimit -Hn)",
                found=counted(count, "log"),
                fix="choose some of them with --node or --rank",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
