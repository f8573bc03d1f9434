"""The data of runs for a report, read from their folders, damaged or not."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dray.contract import files
from dray.contract.findings import DrayError, counted
from dray.planning.schema import Plan
from dray.runs import store
from dray.runs.finish import read_failures
from dray.runs.metrics import Event, Startup, number, parsed, read_startup, whole
from dray.runs.report import why
from dray.runs.report.plots import Point
from dray.runs.result import Result, result_of, who
from dray.runs.status import utc
from dray.runs.store import RunPaths

CURVES = ("loss", "lr", "tokens_per_s", "mfu", "step_s", "checkpoint_s", "memory_gb")
READ_BYTES = 8 << 20
"""Of a longer metrics.jsonl only every second, third ... step is read: to parse a million steps takes three seconds."""
_PLAIN_STEP = b'"checkpoint_s": 0.0,'
"""In the line of a step that did not wait for a checkpoint. The others are few, and all waits are summed."""


@dataclass
class Trace:
    """The metrics of all attempts. A step that was repeated after a resume has its last numbers."""

    curves: dict[str, list[Point]] = field(default_factory=lambda: {name: [] for name in CURVES})
    """The steps at which a metric has a number, and these numbers."""
    nodes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Each node's own seconds per step, by name."""
    evals: dict[str, dict[int, Event]] = field(default_factory=lambda: defaultdict(dict))
    """Evaluations by dataset and step."""
    events: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """All other events by kind, each with its `attempt`."""
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The first and the last logged step of each attempt."""
    data_s: float = 0.0
    """Total seconds of waiting for data, with repeated steps."""
    checkpoint_s: float = 0.0
    """Total seconds of waiting for checkpoints, with repeated steps."""
    every: int = 1
    """Every how many steps one was read."""
    damaged: int = 0
    """Lines that are no events."""

    def read(self, attempt: int, path: Path) -> None:
        """Add the events of an attempt; OSError if its file cannot be read."""
        hosts: list[str] = []
        skipped = b""
        with files.open_regular(path) as file:
            every = os.fstat(file.fileno()).st_size // READ_BYTES + 1
            self.every = max(self.every, every)
            for place, line in enumerate(file):
                if place % every and _PLAIN_STEP in line:
                    skipped = line
                    continue
                event = parsed(line)
                if event is None:
                    self.damaged += line.endswith(b"\n")  # else it is being written
                elif event.get("event") == "step":
                    skipped = b""
                    self._add_step(event, attempt, hosts)
                    self.data_s += 0.0 if place % every else every * (number(event, "data_s") or 0.0)
                else:
                    self._add_event(event, attempt)
                    if event.get("event") == "start":
                        names = event.get("hosts")
                        hosts = list(dict.fromkeys(map(str, names))) if isinstance(names, list) else []
        if last := parsed(skipped):
            self._add_step(last, attempt, hosts)

    def _add_step(self, event: Event, attempt: int, hosts: list[str]) -> None:
        step = whole(event, "step")
        if step is None:
            return
        self.steps[attempt] = (self.steps.get(attempt, (step, step))[0], step)
        self.checkpoint_s += number(event, "checkpoint_s") or 0.0
        for name, points in self.curves.items():
            while points and points[-1][0] >= step:
                points.pop()
            if (value := number(event, name)) is not None:
                points.append((step, value))
        times = event.get("node_s")
        if isinstance(times, list) and len(times) == len(hosts):
            for host, seconds in zip(hosts, times, strict=True):
                if isinstance(seconds, int | float):
                    self.nodes[host].append(seconds)

    def _add_event(self, event: Event, attempt: int) -> None:
        kind, step = str(event.get("event")), whole(event, "step")
        if "loss" in event and step is not None:
            self.evals[kind][step] = event
        else:
            self.events[kind].append({**event, "attempt": attempt})

    def values(self, name: str) -> list[float]:
        """The numbers of a metric."""
        return [value for _, value in self.curves[name]]

    def median(self, name: str) -> float | None:
        """The median of a metric."""
        values = self.values(name)
        return statistics.median(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt; a file that is missing or damaged makes its field None or empty."""

    number: int
    began: str
    hosts: list[str]
    result: Result | None
    startup: Startup
    failures: list[tuple[str, str]]
    """When and why: the first failure before each restart, and the one that ended the attempt."""
    profile: dict[str, Any]
    """The longest kernels of some steps, with the path of their trace."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run, with all its attempts, or one of them."""

    name: str
    folder: str
    explained: why.Report
    """How its last attempt ended."""
    plan: Plan | None
    trace: Trace
    attempts: list[Attempt]
    warnings: list[str]
    prefix: str = ""
    """The name before each caption, if the report is of several runs."""


def gather(folder: Path) -> Run:
    """Read all attempts of a run, or one attempt if its folder was given."""
    last = store.last_attempt(folder)
    is_one = folder.absolute() == last.folder
    numbers = [last.attempt] if is_one else store.attempts(last.run)
    explained = why.look(last)
    trace, warnings = Trace(), list(explained.warnings)
    attempts = []
    plan = None
    for attempt in numbers:
        paths = RunPaths(last.run, attempt)
        try:
            trace.read(attempt, paths.metrics)
        except FileNotFoundError:
            pass
        except OSError as error:
            warnings.append(f"{paths.metrics} cannot be read: {error.strerror}")
        own_plan = None
        with suppress(DrayError, OSError):  # one that is missing or damaged
            own_plan = plan = store.plan_of(paths)
        attempts.append(_attempt(paths, own_plan))
    if trace.damaged:
        warnings.append(f"metrics.jsonl: {counted(trace.damaged, 'damaged line')} left out")
    return Run(
        name=f"{last.run.name}, attempt {last.attempt}" if is_one else last.run.name,
        folder=str(last.folder if is_one else last.run),
        explained=explained,
        plan=plan,
        trace=trace,
        attempts=attempts,
        warnings=warnings,
    )


def _attempt(paths: RunPaths, plan: Plan | None) -> Attempt:
    result = result_of(paths)
    hosts = [node.name for node in plan.world.nodes] if plan else []
    began = store.written(paths.plan)
    profile: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        profile = {**json.loads(files.read(paths.profile)), "trace": paths.profile_trace}
    return Attempt(
        number=paths.attempt,
        began=utc(began) if began else "",
        hosts=result.hosts if result else hosts,
        result=result,
        startup=(result and result.startup) or read_startup(paths, hosts) or Startup(parts={}),
        failures=_failures(paths),
        profile=profile,
    )


def _failures(paths: RunPaths) -> list[tuple[str, str]]:
    failures = []
    for folder in [*sorted(paths.failures.glob("restart-*")), paths.failures]:
        with suppress(OSError, ValueError, OverflowError):
            for record in read_failures(folder, paths.logs, warn=lambda _: None)[:1]:
                failures.append((utc(record.time), f"{who(record.cause)}: {record.cause.head}"))
    return failures
