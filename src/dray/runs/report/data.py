"""The data of runs for a report, read from their folders, damaged or not."""

from __future__ import annotations

import calendar
import json
import math
import statistics
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dray.contract import files
from dray.contract.findings import DrayError
from dray.contract.start_times import NAMES
from dray.planning.schema import Plan
from dray.runs import records, result, startup, store, why
from dray.runs.metrics import Event, number, parsed, whole
from dray.runs.report.plots import Span
from dray.runs.result import Result, who
from dray.runs.startup import Startup
from dray.runs.store import RunPaths

COLUMNS = ("step", "time", "loss", "lr", "tokens_per_s", "mfu", "step_s", "data_s", "checkpoint_s", "memory_gb")
_EVENTS = 500  # of each kind that is kept
_SAMPLE = 100_000  # steps of which a median is made


@dataclass
class Trace:
    """The metrics of all attempts: a column of numbers for each key of a step. A repeated step has its last numbers."""

    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    again: int = 0
    """The number of steps repeated after a resume."""
    spent: Counter[str] = field(default_factory=Counter)
    """Total seconds of data_s and checkpoint_s, with repeated steps."""
    evals: dict[str, dict[int, Event]] = field(default_factory=dict)
    """Evaluations by dataset and step."""
    events: dict[str, list[Event]] = field(default_factory=dict)
    """All other events by kind, each with its `attempt`."""
    nodes: dict[str, array[float]] = field(default_factory=dict)
    """Each node's own seconds per step, by name."""
    ends: dict[int, tuple[Event, Event]] = field(default_factory=dict)
    """The first and the last step of each attempt."""
    damaged: int = 0
    """Lines that are no events."""

    def read(self, attempt: int, path: Path) -> None:
        """Add the events of an attempt; OSError if its file cannot be read."""
        hosts: list[str] = []
        with files.open_regular(path) as file:
            while lines := file.readlines(1 << 16):
                steps: list[Event] = []
                for event in self._events(lines):
                    if event.get("event") == "step":
                        steps.append(event)
                    else:
                        self._other(event, attempt)
                        if event.get("event") == "start":
                            self._steps(steps, attempt, hosts)
                            names = event.get("hosts")
                            steps, hosts = [], list(dict.fromkeys(map(str, names))) if isinstance(names, list) else []
                self._steps(steps, attempt, hosts)

    def _events(self, lines: list[bytes]) -> list[Event]:
        """The events of these lines; all at once, if none is damaged, which takes half the time."""
        try:
            found = from_json(b"[" + b",".join(lines) + b"]")
        except ValueError:
            found = [parsed(line) for line in lines if line.endswith(b"\n")]
        events = [event for event in found if type(event) is dict]
        self.damaged += len(found) - len(events)
        return events

    def _other(self, event: Event, attempt: int) -> None:
        kind, step = str(event.get("event"))[:200], whole(event, "step")
        if "loss" in event and step is not None:
            self.evals.setdefault(kind, {})[step] = event
        elif len(kept := self.events.setdefault(kind, [])) < _EVENTS:
            kept.append({**event, "attempt": attempt})

    def _steps(self, steps: list[Event], attempt: int, hosts: Sequence[str]) -> None:
        steps = [one for one in steps if type(one.get("step")) is int and 0 <= one["step"] < 1 << 62]
        if not steps:
            return
        if any(later["step"] <= one["step"] for one, later in pairwise(steps)):  # training went back
            for one in steps:
                self._steps([one], attempt, hosts)
            return
        self.ends[attempt] = (self.ends.get(attempt, steps)[0], steps[-1])
        kept = bisect_left(self.columns["step"], steps[0]["step"])
        self.again += len(self.columns["step"]) - kept
        for name, column in self.columns.items():
            del column[kept:]
            added = _column(steps, name)
            column.extend(added)
            if name in ("data_s", "checkpoint_s"):
                self.spent[name] += sum(_finite(added))  # type: ignore[assignment]
        own = [times for one in steps if isinstance(times := one.get("node_s"), list) and len(times) == len(hosts)]
        for place, host in enumerate(hosts):
            self.nodes.setdefault(host, array("d")).extend(_column(own, place))

    def points(self, name: str) -> tuple[Sequence[float], Sequence[float]]:
        """The steps at which the column has a number, and these numbers."""
        steps, values = self.columns["step"], self.columns[name]
        if math.isfinite(sum(values)):
            return steps, values
        found = [(x, y) for x, y in zip(steps, values, strict=True) if math.isfinite(y)]
        return [x for x, _ in found], [y for _, y in found]

    def median(self, name: str) -> float | None:
        """The median of a column."""
        values = self.points(name)[1]
        return statistics.median(sample(values)) if values else None

    def peak(self, name: str) -> float | None:
        """The greatest number of a column."""
        return max(self.points(name)[1], default=None)

    def of(self, kind: str, attempt: int | None = None) -> list[Event]:
        """The events of a kind."""
        return [one for one in self.events.get(kind, []) if attempt in (None, one["attempt"])]

    def first(self, key: str) -> float | None:
        """The first number that a start has for this key."""
        return next((value for one in self.of("start") if (value := number(one, key)) is not None), None)


def _column(rows: Sequence[Any], key: str | int) -> array[float]:
    """The numbers that the rows have for this key; NaN for what is none."""
    try:
        return array("d", map(itemgetter(key), rows))
    except (TypeError, OverflowError, LookupError):
        found = [number({"": row.get(key) if isinstance(row, dict) else row[key]}, "") for row in rows]
        return array("d", [math.nan if value is None else value for value in found])


def _finite(values: Sequence[float]) -> Sequence[float]:
    return values if math.isfinite(sum(values)) else [value for value in values if math.isfinite(value)]


def sample(values: Sequence[float]) -> list[float]:
    """At most 100,000 of the numbers, evenly, sorted."""
    return sorted(_finite(values)[:: len(values) // _SAMPLE + 1])


@dataclass(frozen=True, kw_only=True)
class Try:
    """One attempt."""

    number: int
    status: str
    why: str
    hosts: Sequence[str]
    began: float
    """When it was planned; 0 if unknown."""
    ended: float
    trained: tuple[float, float]
    """When it logged its first and its last step; 0 if it logged none."""
    steps: tuple[int | None, int | None]
    startup: Sequence[Span]
    """The parts of the start, up to the first step."""
    nodes: Startup | None
    failures: Sequence[tuple[float, str]]
    """When and why: the first failure before each restart, and the one that ended the attempt."""
    result: Result | None
    profile: dict[str, Any]
    """The longest kernels of some steps, with the path of their trace."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run, with all its attempts, or one of them."""

    name: str
    folder: str
    told: why.Report
    """How its last attempt ended."""
    result: Result | None
    plan: Plan | None
    trace: Trace
    tries: Sequence[Try]
    warnings: Sequence[str]


def gather(folder: Path) -> Run:
    """Read all attempts of a run, or one attempt if its folder was given."""
    last = store.last_attempt(folder)
    is_one = folder.absolute() == last.folder
    numbers = [last.attempt] if is_one else [found for found in store.attempts(last.run) if found <= last.attempt]
    told = why.look(last)
    trace, warnings = Trace(), list(told.warnings)
    earlier = {one.attempt: one for one in told.history}
    tries, plans = [], []
    for attempt in numbers:
        paths = RunPaths(last.run, attempt)
        try:
            trace.read(attempt, paths.metrics)
        except FileNotFoundError:
            pass
        except OSError as error:
            warnings.append(f"{paths.metrics} cannot be read: {error.strerror}")
        plan = None
        with suppress(DrayError, OSError):
            plan = store.plan_of(paths)
            plans.append(plan)
        tries.append(_attempt(paths, plan, trace, earlier.get(attempt)))
    if trace.damaged:
        warnings.append(f"{trace.damaged:,} damaged lines of metrics.jsonl left out")
    return Run(
        name=f"{last.run.name}, attempt {last.attempt}" if is_one else last.run.name,
        folder=str(last.folder if is_one else last.run),
        told=told,
        result=tries[-1].result,
        plan=plans[-1] if plans else None,
        trace=trace,
        tries=tries,
        warnings=warnings,
    )


def _attempt(paths: RunPaths, plan: Plan | None, trace: Trace, earlier: result.Attempt | None) -> Try:
    own = None
    with suppress(OSError, ValueError):
        own = result.read(paths.result)
    first, last = trace.ends.get(paths.attempt, ({}, {}))
    began = store.written(paths.plan) or 0.0
    trained = number(first, "time") or 0.0, number(last, "time") or 0.0
    if 0 < trained[0] < began:  # the folder is a copy, with new file times
        began = 0.0
    reason = earlier.why if earlier else ""
    if own:
        reason = own.cause.why if own.cause else own.reason
    finished = own.finished if own else None
    names = [node.name for node in plan.world.nodes] if plan else []
    kept = own.startup if own else None
    nodes = startup.read(paths, names, kept.parts.get("queue") if kept else None) or kept
    profile: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        profile = {**json.loads(files.read(paths.profile)), "trace": paths.profile_trace}
    return Try(
        number=paths.attempt,
        status=own.status if own else earlier.status if earlier else "no result",
        why=(reason or "").partition("\n")[0][:200],
        hosts=(own.hosts if own else None) or names,
        began=began,
        ended=_seconds(finished) if finished else trained[1],
        trained=trained,
        steps=(own.first_step if own and own.first_step is not None else whole(first, "step"),
               (own and own.steps) or whole(last, "step")),
        startup=_spans(nodes.parts if nodes else {}, began, trained[0]),
        nodes=nodes,
        failures=_failures(paths),
        result=own,
        profile=profile,
    )  # fmt: skip


def _spans(parts: dict[str, float], began: float, first_step: float) -> list[Span]:
    """The parts of a start with their durations; their places in time are only for the drawing."""
    total = sum(parts.values())
    since = first_step - total if first_step else began - parts.get("queue", 0.0)
    spans = []
    for name, seconds in parts.items():
        spans.append(Span(since, since + seconds, NAMES.get(name, name)))
        since += seconds
    return spans


def _failures(paths: RunPaths) -> list[tuple[float, str]]:
    found = []
    for folder in [*sorted(paths.failures.glob("restart-*")), paths.failures]:
        with suppress(OSError):
            for one in records.read(folder, paths.logs, warn=lambda _: None)[:1]:
                found.append((one.time, f"{who(one.cause)}: {one.cause.why.partition(chr(10))[0][:300]}"))
    return found


def _seconds(at: str) -> float:
    """Seconds since 1970 of a time in result.json."""
    with suppress(ValueError, OverflowError):
        return float(calendar.timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")))
    return 0.0
