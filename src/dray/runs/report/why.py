"""Explain why a run failed, from the files in its folder. Read only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dray.contract import files, secrets
from dray.contract.control_characters import printable
from dray.runs import result as results
from dray.runs import slurm
from dray.runs import status as states
from dray.runs.finish import Ended, cause_of_reason, explained
from dray.runs.result import UNKNOWN, Attempt, Cause, Result, failed, history, notes
from dray.runs.status import Stop
from dray.runs.store import Attempt as StoredAttempt
from dray.runs.store import Run, RunPaths, Table, is_run, last_attempt, reason

_LINES, _WIDE = 12, 400  # lines of a job's output, and letters of each line
_NOW = {
    states.QUEUED: "it waits in the queue",
    states.RUNNING: "it has no result yet",
    states.LOST: "it was killed before it could write a result",
    states.NO_RESULT: "it is active, or was killed before it could write a result",
}


class Report(BaseModel):
    """The answer of `dray why`."""

    model_config = ConfigDict(frozen=True)

    run: str
    attempt: int
    """The attempt's number; 0 before the first."""
    folder: str
    status: str
    """done, failed or stopped; without a result as `dray status` says."""
    now: str = ""
    """The status in words, if there is no result."""
    exit_code: int | None = None
    reason: str | None = None
    """What stopped the run."""
    at: str | None = None
    cause: Cause | None = None
    """The first failure."""
    name: str = UNKNOWN
    """The name of the cause, or of what stopped the run."""
    fix: str = ""
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
    """The report of a run without an attempt: its job, and the end of the job's output."""
    seen = states.status(run)
    job = run.job if seen.state == states.LOST else None
    evidence = _by_slurm(slurm.last_state(job.id, job.cluster), job.id) if job else []
    values = secrets.of_environment()
    for log in sorted(filter(Path.is_file, run.folder.glob("job-*.log")), key=os.path.getmtime)[-1:]:
        evidence += [f"{log.name}: {secrets.redacted(line, values)}" for line in files.tail(log, _LINES)]
    fields = {"run": run.name, "attempt": 0, "folder": str(run.folder), "status": seen.state}
    fields |= {"now": seen.why or _NOW.get(seen.state, ""), "evidence": evidence, "warnings": seen.warnings}
    return Report(**printable(fields))


def look(paths: RunPaths) -> Report:
    """The report of an attempt."""
    warnings: list[str] = []
    fields: Table = {"run": paths.run.name, "attempt": paths.attempt, "folder": str(paths.run), "evidence": []}
    if result := _result(paths, warnings):
        cause = result.cause
        fields |= result.model_dump() | {"notes": [*notes(result)], "warnings": [*result.warnings, *warnings]}
    else:
        fields |= _unfinished(paths) | {"warnings": warnings}
        cause = None  # stopped ranks may die in any way; none of them is the cause
        if fields["status"] != states.STOPPED:
            ended = Ended(paths, code=0)
            cause = explained(ended.recorded(paths.failures), paths.logs, ended.plan)
            warnings += ended.warnings
    fields |= cause_of_reason(fields["reason"])
    if cause:
        fields |= {"cause": cause.model_dump(), "evidence": [*cause.evidence, *fields["evidence"]]}
        if cause.name != UNKNOWN:
            fields |= {"name": cause.name, "fix": cause.fix}
    return Report(**printable(fields))


def _result(paths: RunPaths, warnings: list[str]) -> Result | None:
    """The result; None if it is missing, or, with a warning, if it is damaged."""
    try:
        return results.read(paths.result)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.append(f"{paths.result} cannot be read: {reason(error)}")
        return None


def _unfinished(paths: RunPaths) -> Table:
    """What is known of an attempt without a result, which runs or was killed."""
    run = Run(paths.run)
    attempt = StoredAttempt(run, paths.attempt)
    job = attempt.job_id
    if any(job == later.job_id for later in run.attempts if later.number > paths.attempt):
        job = ""  # requeued: Slurm tells of the later attempt
    ended = slurm.last_state(job, attempt.facts.get("cluster", "")) if job else ""
    state, at, why = states.NO_RESULT, None, states.reason_of_state(ended)
    with suppress(OSError):  # another user's folder
        seen = states.status(paths.folder)
        state, at = seen.state, seen.finished
        if state == states.STOPPED and not (why and seen.why == states.TERM):  # Slurm tells more than its signal
            why = seen.why or why
    if why and Stop(why, "").by_wish:
        state = states.STOPPED
    fields: Table = {"status": state, "reason": why or None, "at": at, "now": _NOW.get(state, "")}
    return fields | {"evidence": _by_slurm(ended, job), "history": history(paths)}


def _by_slurm(state: str, job: str) -> list[str]:
    return [f"Slurm: job {job}: {state}"] if state else []


def text(report: Report) -> str:
    """The report in half a page."""
    attempt = f", attempt {report.attempt}" if report.attempt else ""
    lines = [f"{report.run}{attempt}: {_status(report)}"]
    if report.cause:
        lines += failed(report.cause, "first to fail")
    if report.cause or report.name != UNKNOWN:
        lines.append(f"  cause: {report.name}")
    if report.fix:
        lines.append(f"  fix: {report.fix}")
    if report.evidence:
        lines += ["evidence:", *(f"  {line}" for line in report.evidence)]
    lines += report.notes
    for earlier in report.history:
        steps = f"step {earlier.steps}" if earlier.steps else None
        known = [part for part in (earlier.status, earlier.why, steps) if part]
        lines.append(f"attempt {earlier.attempt}: {', '.join(known)}")
    lines += [f"warning: {warning}" for warning in report.warnings]
    lines.append(f"run folder: {report.folder}")
    lines = "\n".join(lines).split("\n")
    return "\n".join(line if len(line) <= _WIDE else f"{line[:_WIDE]} ..." for line in lines)


def _status(report: Report) -> str:
    if report.now:
        return f"{report.status}: {report.now}"
    if report.status == "done":
        return "done, nothing failed"
    by = f" by {report.reason}" if report.reason else ""
    at = f" at {report.at}" if report.at else ""
    end = "before it could write a result" if report.exit_code is None else f"exit code {report.exit_code}"
    return f"{report.status}{by}{at}, {end}"
