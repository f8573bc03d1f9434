"""Explain why a run failed, from the files in its folder. Read only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dray import facts, process
from dray.contract import files, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError, counted
from dray.planning.schema import Plan
from dray.runs import again, causes, logs, records, slurm, stop
from dray.runs import result as results
from dray.runs import status as statuses
from dray.runs.result import UNKNOWN, Attempt, Cause, Result, comes_next, restarts, who
from dray.runs.slurm import Slurm
from dray.runs.stop import Stop
from dray.runs.store import Run, RunPaths, attempts, is_run, last_attempt, reason
from dray.runs.write import read

_SHOWN, _WIDE = 12, 400  # last lines, and letters of each
_AFTER = 6
_ASK_S = 10.0
_CLUSTER = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NO_RESULT = statuses.NO_RESULT


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
    if is_run(folder) and not attempts(folder):
        return RunPaths(folder), _before(folder)
    paths = last_attempt(folder)
    return paths, look(paths)


def _before(run: Path) -> Report:
    """The report of a run without an attempt: its job, and the end of the job's log."""
    seen, submitted = statuses.status(run, Slurm(), closely=True), Run(run).job
    slurm, evidence = "", list[str]()
    if submitted and seen.state == statuses.LOST:
        slurm = _accounted(submitted.id, submitted.cluster)[0]
    values = secrets.passed(
        (name for name, value in os.environ.items() if secrets.is_variable(name, value)), os.environ
    )
    for log in sorted(logs.of_job(run), key=lambda log: log.number)[-1:]:
        lines = files.tail(log.path, _SHOWN)
        evidence = [f"{log.path.name}: {secrets.redacted(line, values)}" for line in lines]
    told = Report(
        run=run.name,
        attempt=0,
        folder=str(run),
        status=seen.state,
        now=seen.why or _doing(seen),
        evidence=[*filter(None, [slurm]), *evidence],
        warnings=seen.warnings,
    )
    return Report.model_validate(printable(told.model_dump()))


def look(paths: RunPaths) -> Report:
    """The report of an attempt."""
    warnings: list[str] = []
    result, plan = read_result(paths, warnings), read_plan(paths, warnings)
    found: list[records.Record] = []
    with suppress(OSError):  # a run without a failure has no such folder
        found = records.read(paths.failures, paths.logs, code=result.exit_code if result else 0, warn=warnings.append)
    status = result.status if result else NO_RESULT
    cause = result.cause if result else found[0].cause if found else None
    if cause and cause.name == UNKNOWN:
        evidence = [*cause.evidence, *records.by_slurm(paths.logs)]
        named = causes.explained(cause.model_copy(update={"evidence": list(dict.fromkeys(evidence))}))
        cause = records.redacted(named, plan)
    seen, slurm, reason = None, "", result.reason if result else None
    if result is None:
        seen = _seen(paths)
        slurm, reason = _asked(paths)
        if seen and seen.state == statuses.STOPPED and not (reason and seen.why == stop.TERM):
            reason = seen.why
        if reason and Stop(reason, "").by_wish:  # stopped ranks may die in any way; none of them is the cause
            status, cause = statuses.STOPPED, None
    told = Report(
        run=result.run if result else paths.run.name,
        attempt=paths.attempt,
        folder=str(paths.run),
        status=status,
        now="" if result else _now(seen),
        exit_code=result.exit_code if result else None,
        reason=reason,
        at=result.at if result else seen.finished if seen else None,
        cause=cause,
        after=[_after(one, found[0]) for one in found[1:]] if cause and status != "stopped" else [],
        evidence=[*(cause.evidence if cause else []), *filter(None, [slurm])],
        notes=_notes(result),
        history=result.history if result else again.history(paths),
        warnings=[*(result.warnings if result else []), *warnings],
    )
    return Report.model_validate(printable(told.model_dump() | _named(cause, reason)))


def _named(cause: Cause | None, reason: str | None) -> dict[str, str]:
    if cause and cause.name != UNKNOWN:
        return {"name": cause.name, "fix": cause.fix, "source": cause.source}
    if reason and (known := causes.of_reason(reason)):
        return {"name": known[0].name, "fix": known[0].fix, "source": known[1].source}
    return {}


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
        return read(paths)
    except (DrayError, OSError) as error:
        warnings.append(f"{paths.plan} cannot be read: {reason(error)}")
        return None


def _seen(paths: RunPaths) -> statuses.State | None:
    """The state of an attempt without a result, as in `dray status`."""
    with suppress(OSError):  # another user's folder
        return statuses.status(paths.folder, Slurm(), closely=True)
    return None


def _now(seen: statuses.State | None) -> str:
    """What the attempt is doing."""
    return (_doing(seen) if seen else "") or "it is active, or was killed before it could write a result"


def _doing(seen: statuses.State) -> str:
    match seen.state:
        case statuses.RUNNING:
            step = f", step {seen.step:,}" + f" of {seen.steps:,}" * bool(seen.steps) if seen.step else ""
            return f"it runs ({seen.live.stage if seen.live else 'training'}{step})"
        case statuses.QUEUED:
            waits = f" {seen.waiting.state}" if seen.waiting else ""
            return f"it waits in the queue (job {seen.job_id or seen.job}{waits})"
        case statuses.LOST:
            return "it was killed before it could write a result"
    return ""


def _asked(paths: RunPaths) -> tuple[str, str | None]:
    """Slurm's state of the run's job, if this machine can ask Slurm."""
    with suppress(DrayError, OSError, ValueError):
        known = facts.parse(files.read(paths.facts).decode(errors="replace"), where=str(paths.facts))
        if known.job:
            return _accounted(known.task or known.job, known.cluster)
    return "", None


def _accounted(job: int | str, cluster: str) -> tuple[str, str | None]:
    with suppress(DrayError):
        if process.which("sacct"):
            clusters = [f"--clusters={cluster}"] if _CLUSTER.fullmatch(cluster) else []
            argv = ["sacct", "-X", "-n", "-P", f"--jobs={job}", *clusters, "--format=State"]
            lines = process.run(argv, check=False, seconds=_ASK_S).out.strip().splitlines()
            if lines:  # else its accounting does not know the job
                return f"Slurm: job {job}: {lines[-1][:100]}", stop.of_state(lines[-1]) or None
        if process.which("scontrol") and cluster in ("", slurm.cluster_name()):
            shown = process.run(["scontrol", "show", "job", "--oneliner", str(job)], check=False, seconds=_ASK_S).out
            if found := re.search(r"\bJobState=([A-Z_]{1,40})", shown):
                return f"Slurm: job {job}: {found[1]}", stop.of_job(shown) or None
    return "", None


def _after(one: records.Record, first: records.Record) -> str:
    seconds = one.time - first.time
    later = f", {seconds:.1f} s later" if 0 <= seconds < 1e7 else ""
    return f"{who(one.cause)} ({one.cause.why.partition(chr(10))[0][:80]}{later})"


def _notes(result: Result | None) -> list[str]:
    if result is None:
        return []
    recovered = [f"recovered: {one}" for one in result.recoveries]
    return [*restarts(result), *recovered, *comes_next(result)]


def text(report: Report) -> str:
    """The report in half a page."""
    return "\n".join(line if len(line) <= _WIDE else f"{line[:_WIDE]} ..." for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"{report.run}{f', attempt {report.attempt}' if report.attempt else ''}: {_status(report)}"
    if report.cause:
        yield from _first(report.cause)
        if report.after:
            shown = ", ".join(report.after[:_AFTER]) + ", ..." * (len(report.after) > _AFTER)
            yield f"{counted(len(report.after), 'other')} failed later, which is not the cause: {shown}"
    if report.cause or report.name != UNKNOWN:
        yield f"cause: {report.name}"
        yield from (f"  {name + ':':<8}{value}" for name, value in _details(report) if value)
    if report.evidence:
        yield "evidence:"
        yield from (f"  {line}" for line in report.evidence)
    yield from report.notes
    yield from map(_earlier, report.history)
    yield from (f"warning: {warning}" for warning in report.warnings)
    yield f"run folder: {report.folder}"


def _details(report: Report) -> Iterator[tuple[str, str]]:
    yield "fix", report.fix
    yield "source", report.source


def _status(report: Report) -> str:
    if report.status == NO_RESULT or not report.attempt:
        return ": ".join(filter(None, [report.status, report.now]))
    if report.status == "done":
        return "done, nothing failed"
    stopped = f" by {report.reason}" if report.reason else ""
    stopped += f" at {report.at}" if report.at else ""
    if report.exit_code is None:
        return f"{report.status}{stopped}, before it could write a result"
    return f"{report.status}{stopped}, exit code {report.exit_code}"


def _first(cause: Cause) -> Iterator[str]:
    head, *rest = cause.why.splitlines() or [""]
    yield f"first to fail: {who(cause)}: {head}"
    yield from rest[:_SHOWN]
    known = cause.why.splitlines()
    yield from (f"  | {line}" for line in cause.last_lines[-_SHOWN:] if line not in known)
    if cause.log:
        yield f"  log: {cause.log}"


def _earlier(one: Attempt) -> str:
    why = f", {one.why}" if one.why else ""
    steps = f", step {one.steps}" if one.steps else ""
    saved = f", saved up to {one.saved_step}" if one.saved_step else ""
    return f"attempt {one.attempt}: {one.status}{why}{steps}{saved}"
