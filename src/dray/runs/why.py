"""Explain why a run failed, from the files in its folder. Read only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dray.contract import files, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError, counted, listed
from dray.planning.schema import Plan
from dray.runs import causes, records, slurm, stop
from dray.runs import result as results
from dray.runs import status as states
from dray.runs.finish import explained
from dray.runs.result import UNKNOWN, Attempt, Cause, Result, history, notes, who
from dray.runs.stop import Stop
from dray.runs.store import Attempt as StoredAttempt
from dray.runs.store import Run, RunPaths, Table, is_run, last_attempt, plan_of, reason

_LINES, _WIDE = 12, 400  # last lines, and letters of each
_OTHERS = 6
NO_RESULT = states.NO_RESULT


class Report(BaseModel):
    """The answer of `dray why`."""

    model_config = ConfigDict(frozen=True)

    run: str
    attempt: int
    """The attempt's number; 0 before the first."""
    folder: str
    status: str
    """done, failed, stopped, or `no result`; before the first attempt also queued, running or lost."""
    now: str = ""
    """What the run is doing, if it has no result."""
    exit_code: int | None = None
    reason: str | None = None
    """What stopped the run."""
    at: str | None = None
    cause: Cause | None = None
    """The first failure."""
    after: list[str] = []
    """Failures after the first, which are no causes."""
    name: str = UNKNOWN
    """The name of the cause, or of what stopped the run."""
    fix: str = ""
    source: str = ""
    evidence: list[str] = []
    notes: list[str] = []
    """Restarts, and whether the job continues by itself."""
    history: list[Attempt] = []
    warnings: list[str] = []


def of(folder: Path) -> tuple[RunPaths, Report]:
    """The report of a run, or of one attempt."""
    run = Run(folder)
    if is_run(folder) and not run.attempts:
        return RunPaths(folder), _before(run)
    paths = last_attempt(folder)
    return paths, look(paths)


def _before(run: Run) -> Report:
    """The report of a run without an attempt: its job, and the end of the job's log."""
    seen = states.status(run, closely=True)
    evidence: list[str] = []
    if run.job and seen.state == states.LOST and (ended := slurm.last_state(run.job.id, run.job.cluster)):
        evidence.append(f"Slurm: job {run.job.id}: {ended}")
    names = [name for name, value in os.environ.items() if secrets.is_variable(name, value)]
    values = secrets.passed(names, os.environ)
    for log in sorted(run.folder.glob("job-*.log"), key=os.path.getmtime)[-1:]:
        evidence += [f"{log.name}: {secrets.redacted(line, values)}" for line in files.tail(log, _LINES)]
    fields = {"run": run.name, "attempt": 0, "folder": str(run.folder), "status": seen.state}
    fields |= {"now": seen.why or _doing(seen), "evidence": evidence, "warnings": seen.warnings}
    return Report(**printable(fields))


def look(paths: RunPaths) -> Report:
    """The report of an attempt."""
    warnings: list[str] = []
    result, plan = read_result(paths, warnings), read_plan(paths, warnings)
    failures: list[records.Record] = []
    with suppress(OSError):  # a run without a failure has no such folder
        failures = records.read(paths.failures, paths.logs, warn=warnings.append)
    fields: Table = {"run": paths.run.name, "attempt": paths.attempt, "folder": str(paths.run)}
    if result:
        cause, evidence = result.cause, list[str]()
        fields |= result.model_dump() | {"notes": [*notes(result)], "warnings": [*result.warnings, *warnings]}
    else:
        unfinished, evidence = _without_result(paths)
        fields |= unfinished | {"warnings": warnings}
        stopped = fields["status"] == states.STOPPED  # stopped ranks may die in any way; none of them is the cause
        cause = explained(failures[0].cause, paths.logs, plan) if failures and not stopped else None
    fields |= causes.of_reason(fields["reason"])
    if cause:
        fields |= {"cause": cause.model_dump(), "after": [_after(failure, failures[0]) for failure in failures[1:]]}
        evidence = [*cause.evidence, *evidence]
        if cause.name != UNKNOWN:
            fields |= {"name": cause.name, "fix": cause.fix, "source": cause.source}
    return Report(**printable(fields | {"evidence": evidence}))


def _without_result(paths: RunPaths) -> tuple[Table, list[str]]:
    """The state of an attempt that runs or was killed, and what Slurm tells of its job."""
    attempt = StoredAttempt(Run(paths.run), paths.attempt)
    ended = slurm.last_state(attempt.job_id, attempt.facts.get("cluster", "")) if attempt.job_id else ""
    evidence = [f"Slurm: job {attempt.job_id}: {ended}"] if ended else []
    now, at, reason = "it is active, or was killed before it could write a result", None, stop.of_state(ended)
    with suppress(OSError):  # another user's folder
        seen = states.status(paths.folder, closely=True)
        now, at = _doing(seen) or now, seen.finished
        if seen.state == states.STOPPED and seen.why and not (reason and seen.why == stop.TERM):
            reason = seen.why
    fields = {"reason": reason or None, "at": at, "history": history(paths)}
    if reason and Stop(reason, "").by_wish:
        return fields | {"status": states.STOPPED}, evidence
    return fields | {"status": NO_RESULT, "now": now}, evidence


def read_result(paths: RunPaths, warnings: list[str]) -> Result | None:
    """The result; None if it is missing, or, with a warning, if it is damaged."""
    try:
        return results.read(paths.result)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.append(f"{paths.result} cannot be read: {reason(error)}")
        return None


def read_plan(paths: RunPaths, warnings: list[str]) -> Plan | None:
    """The plan, or a warning."""
    try:
        return plan_of(paths)
    except (DrayError, OSError) as error:
        warnings.append(f"{paths.plan} cannot be read: {reason(error)}")
        return None


def _doing(seen: states.State) -> str:
    """What a run without a result does now; empty if nobody can tell."""
    match seen.state:
        case states.RUNNING:
            steps = f" of {seen.steps:,}" if seen.steps else ""
            step = f", step {seen.step:,}{steps}" if seen.step else ""
            return f"it runs ({seen.live.stage if seen.live else 'training'}{step})"
        case states.QUEUED:
            waits = f" {seen.waiting.state}" if seen.waiting else ""
            return f"it waits in the queue (job {seen.job_id}{waits})"
        case states.LOST:
            return "it was killed before it could write a result"
    return ""


def _after(failure: records.Record, first: records.Record) -> str:
    return f"{who(failure.cause)} ({failure.cause.head[:80]}, {failure.time - first.time:.1f} s later)"


def text(report: Report) -> str:
    """The report in half a page."""
    return "\n".join(line if len(line) <= _WIDE else f"{line[:_WIDE]} ..." for line in _text(report))


def _text(report: Report) -> Iterator[str]:
    attempt = f", attempt {report.attempt}" if report.attempt else ""
    yield f"{report.run}{attempt}: {_status(report)}"
    if cause := report.cause:
        head, *rest = cause.why.splitlines() or [""]
        yield f"first to fail: {who(cause)}: {head}"
        yield from rest[:_LINES]
        yield from (f"  | {line}" for line in cause.last_lines[-_LINES:] if line not in (head, *rest))
        if cause.log:
            yield f"  log: {cause.log}"
    if report.after:
        others = listed(report.after, _OTHERS)
        yield f"{counted(len(report.after), 'other')} failed later, which is not the cause: {others}"
    if report.cause or report.name != UNKNOWN:
        yield f"cause: {report.name}"
    if report.fix:
        yield f"  fix:    {report.fix}"
        yield f"  source: {report.source}"
    if report.evidence:
        yield "evidence:"
        yield from (f"  {line}" for line in report.evidence)
    yield from report.notes
    for attempt_ in report.history:
        why = f", {attempt_.why}" if attempt_.why else ""
        steps = f", step {attempt_.steps}" if attempt_.steps else ""
        saved = f", saved up to {attempt_.saved_step}" if attempt_.saved_step else ""
        yield f"attempt {attempt_.attempt}: {attempt_.status}{why}{steps}{saved}"
    yield from (f"warning: {warning}" for warning in report.warnings)
    yield f"run folder: {report.folder}"


def _status(report: Report) -> str:
    if report.now:
        return f"{report.status}: {report.now}"
    if report.status == "done":
        return "done, nothing failed"
    by = f" by {report.reason}" if report.reason else ""
    at = f" at {report.at}" if report.at else ""
    end = "before it could write a result" if report.exit_code is None else f"exit code {report.exit_code}"
    return f"{report.status}{by}{at}, {end}"
