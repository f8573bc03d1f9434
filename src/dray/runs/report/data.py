"""The data of a run for a report, read from its folder, damaged or not. Read only."""

from __future__ import annotations

import calendar
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.contract import files
from dray.contract.control_characters import printable
from dray.planning.schema import Plan
from dray.runs import again, records, why
from dray.runs import startup as measured
from dray.runs.metrics import Metrics, number, whole
from dray.runs.recovery import Recovery
from dray.runs.report import startup
from dray.runs.report.curves import Trace
from dray.runs.result import Attempt, Result, who
from dray.runs.startup import Startup
from dray.runs.store import RunPaths, attempts, last_attempt, reason, written

_ATTEMPTS = 200
_LINE = "\n"


@dataclass(frozen=True)
class Failed:
    """A failure from which an attempt recovered, or with which it ended."""

    time: float
    why: str


@dataclass(frozen=True)
class Try:
    """One attempt."""

    number: int
    status: str
    why: str
    hosts: tuple[str, ...]
    began: float
    """When it was planned; 0 if unknown."""
    ended: float
    steps: tuple[int | None, int | None]
    """The first and the last step."""
    lost_s: float | None
    startup: tuple[startup.Part, ...]
    nodes: Startup | None
    """The measured start-up of each node."""
    failures: tuple[Failed, ...]
    recoveries: tuple[Recovery, ...]
    preflight: dict[str, Any]
    profile: dict[str, Any]
    """The longest kernels of some steps, with the path of their trace."""


@dataclass(frozen=True)
class Run:
    """One run, with all its attempts."""

    name: str
    folder: str
    paths: RunPaths
    """The files of its last attempt."""
    told: why.Report
    """How its last attempt ended."""
    result: Result | None
    plan: Plan | None
    trace: Trace
    tries: tuple[Try, ...]
    warnings: tuple[str, ...]


def gather(folder: Path) -> Run:
    """Read all attempts of a run, or one attempt if its folder was given."""
    last = last_attempt(folder)
    one = folder.absolute() == last.folder
    numbers = [last.attempt] if one else [n for n in attempts(last.run) if n <= last.attempt][-_ATTEMPTS:]
    trace, warnings = Trace(), list[str]()
    told = why.look(last)
    result, tries = why.read_result(last, []), list[Try]()
    known = {one.attempt: one for one in told.history}
    if result:
        known[last.attempt] = again.attempt(result, last.attempt)
    for number_ in numbers:
        paths = RunPaths(last.run, number_)
        metrics = Metrics(paths.metrics)
        try:
            trace.read(number_, metrics)
        except OSError as error:
            warnings.append(f"{paths.metrics} cannot be read: {reason(error)}")
        warnings += metrics.warnings()
        of_one = known.get(number_) or Attempt(attempt=number_, status=why.NO_RESULT)
        tries.append(_try(paths, trace, of_one))
    return Run(
        name=printable(f"{last.run.name}, attempt {last.attempt}" if one else last.run.name),
        folder=printable(str(last.folder if one else last.run)),
        paths=last,
        told=told,
        result=result,
        plan=next((plan for n in reversed(numbers) if (plan := why.read_plan(RunPaths(last.run, n), []))), None),
        trace=trace,
        tries=tuple(tries),
        warnings=tuple(printable([*told.warnings, *warnings])),
    )


def _try(paths: RunPaths, trace: Trace, known: Attempt) -> Try:
    plan = why.read_plan(paths, [])
    starts = trace.of("start", paths.attempt)
    first, latest = trace.steps.get(paths.attempt, (None, None))
    began = written(paths.plan) or 0.0
    if first and began > (number(first, "time") or began):  # the folder is a copy, with new file times
        began = 0.0
    ended = _seconds(known.finished) if known.finished else (number(latest, "time") if latest else 0.0) or 0.0
    result = why.read_result(paths, [])
    found = _measured(paths, plan, result)
    begin = known.first_step if known.first_step is not None else whole(starts[0] if starts else {}, "first_step")
    return Try(
        number=paths.attempt,
        status=known.status,
        why=(known.why or "").partition("\n")[0],
        hosts=tuple((result.hosts if result else []) or ([node.name for node in plan.world.nodes] if plan else [])),
        began=began,
        ended=ended,
        steps=(begin, known.steps if known.steps is not None else whole(latest or {}, "step")),
        lost_s=known.lost_s,
        startup=startup.measured(found.parts, planned=began, first=first) if found else (),
        nodes=found,
        failures=tuple(_failures(paths)),
        recoveries=tuple(result.recoveries) if result else (),
        preflight=_json(paths.preflight_report),
        profile=_json(paths.profile) | {"trace": printable(str(paths.profile_trace))},
    )


def _measured(paths: RunPaths, plan: Plan | None, result: Result | None) -> Startup | None:
    """The start-up of all nodes, from the first node's file; the queue, or all if the file is gone, from the result."""
    kept = result.startup if result else None
    names = [node.name for node in plan.world.nodes] if plan else []
    return measured.read(paths, names, kept.parts.get("queue") if kept else None) or kept


def _failures(paths: RunPaths) -> list[Failed]:
    """The first failure before each restart, and the failure that ended the attempt."""
    found = []
    for folder in [*sorted(paths.failures.glob("restart-*"))[:_ATTEMPTS], paths.failures]:
        with suppress(OSError):
            read = records.read(folder, paths.logs, code=0, warn=lambda _: None)
            found += [
                Failed(one.time, printable(f"{who(one.cause)}: {one.cause.why.partition(_LINE)[0][:300]}"))
                for one in read[:1]
            ]
    return found


def _json(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        report = printable(json.loads(files.read(path)))
        return report if isinstance(report, dict) else {}
    return {}


def _seconds(at: str) -> float:
    """Seconds since 1970 of a time in result.json."""
    with suppress(ValueError, OverflowError):
        return float(calendar.timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")))
    return 0.0
