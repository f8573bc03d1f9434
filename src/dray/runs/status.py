"""The state of a run: whether it waits, runs or has ended, how far it is, and what stopped it.

Only `status` decides, from the run's files, Slurm's queue, and the run's process on this machine.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from dray.contract import files, processes, run_folder, scratch
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError
from dray.runs import metrics, slurm
from dray.runs.metrics import Spent, Startup
from dray.runs.slurm import JUST_S, Job, Slurm
from dray.runs.store import Attempt, Queued, Run, RunPaths, Table, dig, is_run, last_attempt, read_json, reason, written

QUEUED, RUNNING, DONE, FAILED, STOPPED, LOST, NO_RESULT = STATES = (
    "queued", "running", "done", "failed", "stopped", "lost", "no result",
)  # fmt: skip
Kind = Literal["queued", "starting", "running", "ended", "unknown"]
FRESH_S = 120.0
"""A run whose files changed within this time is alive: the trainer touches its lease every 10 s, and NFS caches a
file's time for up to a minute."""
_STAGES = (
    (run_folder.rank_log(0), "ranks load the data and build the model"),
    (run_folder.PREFLIGHT, "preflight, then the launcher starts the ranks"),
    (run_folder.RENDEZVOUS, "rendezvous: the first node waits for the others"),
    (run_folder.node_log(0), "nodes start the image"),
)
"""What happens before the first line of metrics, by the newest of these files."""

_LEASE = f"{run_folder.CHECKPOINTS}/lease.json"  # which the trainer touches
# An attempt's logs with Slurm's messages about its end; the jobs' own logs are in the run folder.
_SLURM_LOGS = (f"{run_folder.LOGS}/srun.log", run_folder.node_log(0))
# Of an attempt, the files that tell how it ended if it was killed.
_END_FILES = (run_folder.PLAN, run_folder.METRICS, run_folder.STOP, *_SLURM_LOGS)
_SLOW = 4  # the last reports of slow ranks
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_NOT_SHOWN = Field(exclude=True)


class Live(BaseModel):
    """A running attempt."""

    model_config = ConfigDict(frozen=True)

    stage: str
    quiet_s: float | None = None
    """Seconds since its metrics or one of its logs was last written."""
    restarts: int = 0
    notes: list[str] = []
    """Failures, slow ranks, failed saves, loss jumps, and a request to end."""


class State(BaseModel):
    """One run at the time of the query."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    run: str
    folder: str
    state: str
    """queued, running, done, failed, stopped, lost (the job ended without a result), or `no result` (it runs, or was
    killed before it could write one)."""
    recipe: str | None = None
    job_id: str | None = None
    """The id for Slurm's commands: 12, or 12_3 for an array task."""
    attempt: int | None = None
    attempts: int = 0
    nodes: list[str] = []
    ranks: _Count | None = None
    started: str | None = None
    """When the last attempt began, or, without one, when the run was submitted."""
    finished: str | None = None
    step: _Count | None = None
    steps: _Count | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    """The time left after the last step that was logged."""
    exit_code: _Count | None = None
    why: str | None = None
    """What failed, or what stopped the run."""
    goes_on: bool = False
    """Whether another attempt follows the last one."""
    waiting: Job | None = None
    live: Live | None = None
    """Details of a running attempt, if requested."""
    startup: Startup | None = None
    """How long each part of the last attempt's start took, if requested."""
    spent: Spent | None = None
    """The cost of all attempts, if the last one has ended."""
    warnings: list[str] = []

    kind: Annotated[Kind, _NOT_SHOWN] = "ended"
    """What has the run: a waiting job, a job before its attempt, a job or process with an attempt, nothing; or
    `unknown`, if this machine cannot tell, because of `unclear`."""
    unclear: Annotated[str, _NOT_SHOWN] = ""
    paths: Annotated[RunPaths | None, _NOT_SHOWN] = None
    """The attempt; None before the first."""
    slurm_job: Annotated[Job | None, _NOT_SHOWN] = None
    """The job that has the run."""
    cluster: Annotated[str, _NOT_SHOWN] = ""
    """The job's cluster, if Slurm knows several; empty for this machine's cluster."""
    process: Annotated[int, _NOT_SHOWN] = 0
    """The process that has the run, on this machine."""
    path: Annotated[Path, _NOT_SHOWN] = Path()
    """The run folder; its name in `folder` is printable."""

    @property
    def where(self) -> str:
        """The job or process that has the run, in words."""
        if self.slurm_job:
            return f"job {self.slurm_job.id}, {self.slurm_job.state}"
        return f"process {self.process}" if self.process else self.unclear


class _Holder(NamedTuple):
    """What has a run."""

    kind: Kind
    slurm_job: Job | None = None
    process: int = 0
    unclear: str = ""


def status(run: Run | Path, slurm: Slurm | None = None, *, closely: bool = False) -> State:
    """The state of a run, or of one attempt by its folder. Pass one `slurm` for many runs: it is asked once.

    Looked at `closely`, a running attempt has its stage, its notes and its start.
    """
    slurm, number = slurm or Slurm(), None
    if isinstance(run, Path):
        paths = None if is_run(run) else last_attempt(run)
        run, number = Run(paths.run if paths else run), paths and paths.attempt
    attempt = next((one for one in run.attempts if one.number == number), run.last)
    return _seen(run, attempt, _holder(run, attempt, slurm), slurm, closely=closely)


def listed(folder: Path, slurm: Slurm) -> State:
    """The state of a run for a list: of one that has ended or was killed, its summary tells it, which is one file."""
    with suppress(DrayError, OSError, ValueError):
        if seen := _by_summary(folder, slurm):
            return seen
    run = Run(folder)
    seen, attempt = status(run, slurm), run.last
    if attempt and attempt.job and attempt.plan and attempt.ended is None and seen.kind == "ended":
        settled = _settled(str(folder), attempt.number, attempt.job_id, time.time())
        if settled and not run.cluster and not run.warnings:
            _summarize(attempt, seen, killed_on=slurm.cluster)  # `dray finish` was killed, too
    return seen


def write_summary(paths: RunPaths) -> None:
    """Write the state of a run that has ended into its summary.json."""
    run = Run(paths.run)
    attempt = run.last
    if attempt and attempt.number == paths.attempt:  # else a late `dray finish`
        _summarize(attempt, _seen(run, attempt, _Holder("ended"), Slurm(), closely=False))


def _summarize(attempt: Attempt, seen: State, **more: str) -> None:
    """Write summary.json. Its time is when the attempt began, so that a list is sorted before any file is opened; the
    folder keeps its own, by which `dray clean` knows the run's age."""
    folder = attempt.run.folder
    file = folder / run_folder.SUMMARY
    with suppress(OSError):  # a list reads the other files then
        changed = folder.stat().st_mtime
        with files.replacing(file, sync=False) as stream:
            stream.write(to_json(seen.model_dump() | {"cluster": attempt.run.cluster} | more) + b"\n")
        os.utime(file, (attempt.began, attempt.began))
        os.utime(folder, (changed, changed))


def _by_summary(folder: Path, slurm: Slurm) -> State | None:
    """What the summary tells, if `status` would tell the same; None without a summary."""
    path = str(folder)  # Path objects would take half of the time
    file = f"{path}/{run_folder.SUMMARY}"
    table = read_json(file, [])
    if table is None:
        return None
    about = os.lstat(file)
    seen, job = State.model_validate(printable(table | {"run": folder.name, "folder": path})), None
    with suppress(DrayError):
        job = slurm.job_of({seen.job_id or "": about.st_mtime}, {path, str(table.get("folder"))}, seen.cluster)
    number = seen.attempt or 0
    if job or seen.goes_on or (written(f"{path}/{run_folder.JOB}") or 0.0) > about.st_mtime:
        return None
    if os.path.lexists(f"{path}/{run_folder.attempt(number + 1)}"):
        return None
    if "killed_on" in table:
        slurm.jobs()  # DrayError: nobody knows
        has_result = os.path.lexists(f"{path}/{run_folder.attempt(number)}/{run_folder.RESULT}")
        if has_result or about.st_uid != os.geteuid() or table["killed_on"] != slurm.cluster:
            return None
        # Its writer may have seen an older state of the disk, whose own clock has all these times.
        if not _settled(path, number, seen.job_id, about.st_ctime):
            return None
    return seen


def _settled(run: str, attempt: int, job: str | None, at: float) -> bool:
    """Whether the files of a killed attempt were complete at this time: none changed shortly before it, or since."""
    names = [_LEASE, f"job-{job}.log", *(f"{run_folder.attempt(attempt)}/{name}" for name in _END_FILES)]
    return all((written(f"{run}/{name}") or 0.0) < at - FRESH_S for name in names)


def _seen(run: Run, attempt: Attempt | None, holder: _Holder, slurm: Slurm, *, closely: bool) -> State:
    fields = _of_attempt(run, attempt, holder, slurm, closely=closely) if attempt else _before(run.job, holder, slurm)
    fields |= {"run": run.name, "folder": str(run.folder), "warnings": run.warnings}
    own: Table = {"path": run.folder, "paths": attempt and attempt.paths, "cluster": run.cluster}
    return _state(printable(fields) | holder._asdict() | own)


def _state(fields: Table) -> State:
    """The state, without the values that a damaged file has instead of others."""
    try:
        return State(**fields)
    except ValidationError as wrong:
        damaged = {str(error["loc"][0]) for error in wrong.errors()}
    return State(**{name: value for name, value in fields.items() if name not in damaged})


# What has a run ----------------------------------------------------------------------------------------------------


def _holder(run: Run, attempt: Attempt | None, slurm: Slurm) -> _Holder:
    """The job or process that has the run."""
    if attempt:
        over = attempt.ended is not None and not run.queued and not attempt.goes_on
    else:
        over = run.job is not None and run.job.stopped is not None
    if not run.queued and not (attempt and attempt.job_id):  # without Slurm
        over = True
        if attempt and attempt.ended is None:
            holder = _local(attempt)
            if holder.kind != "ended":
                return holder
    try:
        if job := _find_job(run, attempt, slurm):
            return _by_job(job, run, attempt, slurm)
        unclear = "" if over else _unlisted(run, attempt, slurm)
    except DrayError as silent:
        unclear = "" if over else silent.problem
    return _Holder("unknown" if unclear else "ended", unclear=unclear)


def _find_job(run: Run, attempt: Attempt | None, slurm: Slurm) -> Job | None:
    """The job that has the run. Slurm itself may requeue an ended one, as after a preemption."""
    ids: dict[str, float] = {}
    folders = {str(run.folder)}
    if run.queued:
        ids[run.queued.id] = run.queued.time
    if attempt:
        ids[attempt.job_id] = attempt.ended or attempt.began
        folders.add(str(attempt.plan.get("run_folder")))
    return slurm.job_of(ids, folders, run.cluster)


def _by_job(job: Job, run: Run, attempt: Attempt | None, slurm: Slurm) -> _Holder:
    """What a job that Slurm lists does with the run."""
    began = attempt.began if attempt and attempt.ended is None else 0.0
    if job.waits and not slurm.is_older(began, run.cluster):
        return _Holder("queued", job)
    if attempt is None or job.id != attempt.job_id:
        return _Holder("starting", job)
    if attempt.ended is None:
        return _Holder("running", job)
    if attempt.goes_on or (job.start or 0.0) > attempt.ended:  # an allocation by salloc outlives an attempt
        return _Holder("starting", job)
    return _Holder("ended")  # Slurm is cleaning up


def _unlisted(run: Run, attempt: Attempt | None, slurm: Slurm) -> str:
    """Why the run may be active although Slurm here does not list its job; empty if it is not."""
    if run.owner != os.geteuid():  # squeue was asked for this user's jobs only
        return f"the job belongs to user {run.owner}"
    began = run.queued.time + JUST_S if run.queued else attempt.began if attempt else 0.0
    if slurm.is_older(began, run.cluster):
        return "it was submitted or began a moment ago, so squeue does not list it yet"
    cluster = attempt.facts.get("cluster", "") if attempt and not run.cluster else ""
    if cluster and cluster != slurm.cluster:  # another cluster with the same disk
        return f"the job is on cluster {cluster}, but Slurm here is {slurm.cluster or 'without a name'}"
    return ""


def _local(attempt: Attempt) -> _Holder:
    """What has an attempt that began without Slurm."""
    process = None
    with suppress(OSError, ValueError):
        match from_json(files.read(attempt.paths.process)):
            case [str(), str(), int(), str()] as found if found[2] > 1:
                process = list(found)
    if process is None or not processes.here(process):
        return _Holder("unknown", unclear="it was started on another machine, or before this machine last booted")
    if not processes.gone(process):
        return _Holder("running", process=process[2])
    if scratch.held(attempt.plan.get("scratch")):
        return _Holder("unknown", unclear="the process that started it ended, but its runner is alive")
    return _Holder("ended")


# What a run is called ----------------------------------------------------------------------------------------------


def _before(job: Queued | None, holder: _Holder, slurm: Slurm) -> Table:
    """What is told of a submitted run before its first attempt."""
    if job is None:
        return {"state": NO_RESULT}
    match holder.kind:
        case "queued":
            seen: Table = {"state": QUEUED, "waiting": holder.slurm_job}
        case "starting":
            seen = {"state": RUNNING, "live": {"stage": "the job is planning the run"}}
        case "ended" if job.stopped:
            why = f"dray stop cancelled job {job.id} in the queue; the run never started"
            seen = {"state": STOPPED, "why": why}
        case "ended":
            why = f"job {job.id} ended before its first attempt: see its output, job-{job.id}.log"
            seen = {"state": LOST, "why": why}
        case _ if slurm.is_absent:
            why = f"this machine has no Slurm, so it cannot tell whether job {job.id} waits, runs or has ended"
            seen = {"state": NO_RESULT, "why": why}
        case _:
            seen = {"state": QUEUED}
    return seen | {"job_id": job.id, "started": utc(job.time)}


def _of_attempt(run: Run, attempt: Attempt, holder: _Holder, slurm: Slurm, *, closely: bool) -> Table:
    """What is told of an attempt."""
    state, stopped = _name(run, attempt, holder, slurm)
    plan, job, result = attempt.plan, holder.slurm_job, attempt.result
    fields: Table = {
        "state": state,
        "recipe": dig(plan, "recipe", "name"),
        "job_id": (job.id if job else attempt.job_id) or None,
        "attempt": attempt.number,
        "attempts": len(run.attempts),
        "nodes": attempt.nodes,
        "ranks": dig(plan, "world", "size"),
        "started": utc(attempt.began),
        "steps": dig(plan, "recipe", "train", "steps"),
        "waiting": job if state == QUEUED else None,
    }
    if result:
        if state == RUNNING:
            fields["live"] = {"stage": "the job is planning the next attempt"}
        return fields | _result(result, run, closely=closely) | {"goes_on": attempt.goes_on}
    if stopped:
        fields |= {"why": stopped.reason, "finished": stopped.at}
    tail: list[metrics.Event] = []
    try:
        tail = metrics.tail(attempt.paths.metrics) if closely else metrics.tail(attempt.paths.metrics, 4096)
        if fields["steps"] is None:  # it counts epochs
            fields["steps"] = metrics.first(attempt.paths.metrics).get("steps")
    except OSError as wrong:
        run.warnings.append(f"{attempt.paths.metrics} cannot be read: {reason(wrong)}")
    if closely and state != QUEUED:
        fields["startup"] = metrics.read_startup(attempt.paths, attempt.nodes)
        fields["live"] = _live(attempt, tail, fields["steps"])
    step = next((event for event in reversed(tail) if event.get("event") == "step"), {})
    fields |= {name: step.get(name) for name in ("step", "loss", "tokens_per_s")}
    if state == RUNNING:
        fields["left_s"] = step.get("seconds_left")
    return fields


def _name(run: Run, attempt: Attempt, holder: _Holder, slurm: Slurm) -> tuple[str, Stop | None]:
    """The state's name, and what stopped an attempt that left no result."""
    told = dig(attempt.result, "status")
    by_result = told if told in (DONE, FAILED, STOPPED) else NO_RESULT
    if attempt is not run.last:  # Slurm's job belongs to a later attempt
        return _lost(attempt) if attempt.ended is None else (by_result, None)
    if holder.kind == "queued":
        return QUEUED, None
    if (holder.slurm_job and not holder.slurm_job.by_salloc) or holder.kind == "starting" or holder.process:
        return RUNNING, None
    if attempt.ended is not None:
        waits = holder.kind == "unknown" and run.queued and not slurm.is_absent
        return QUEUED if waits else by_result, None
    # An salloc allocation outlives its runs.
    return _lost(attempt) if holder.kind == "ended" else _by_files(attempt)


def _result(result: Table, run: Run, *, closely: bool) -> Table:
    """What the result tells."""
    cause, warnings = dig(result, "cause", "why"), result.get("warnings")
    names = ["finished", "exit_code", "tokens_per_s", "spent"]
    if closely:
        names.append("startup")
        run.warnings += map(str, warnings) if isinstance(warnings, list) else ()
    return {name: result.get(name) for name in names} | {
        "step": result.get("steps"),
        "loss": result.get("loss_last"),
        "why": cause.partition("\n")[0] if isinstance(cause, str) else result.get("reason"),
    }


def _lost(attempt: Attempt) -> tuple[str, Stop | None]:
    """The state of an attempt that is gone: stopped if somebody asked for it, else lost."""
    stopped = stop_in_logs(attempt.paths.folder, attempt.job, attempt.began)
    if stopped is None:
        reasons = {run_folder.BY_USER: run_folder.BY_USER, "TERM": TERM}
        for line in stop_requests(attempt.paths.folder):
            if line in reasons:
                stopped = Stop(reasons[line], utc(written(attempt.paths.stop) or 0.0))
    return (STOPPED, stopped) if stopped and stopped.by_wish else (LOST, None)


def _by_files(attempt: Attempt) -> tuple[str, Stop | None]:
    """The state of an attempt without a result, by its files alone."""
    paths = attempt.paths
    held = scratch.held(attempt.plan.get("scratch"))
    if held:
        return RUNNING, None
    if held is False or stop_in_logs(paths.folder, attempt.job, attempt.began):
        return _lost(attempt)
    lease = written(paths.run / _LEASE) or 0.0
    if max(lease, _sign_of_life(paths)) > time.time() - FRESH_S:
        return RUNNING, None
    return _lost(attempt) if "TERM" in stop_requests(paths.folder) else (NO_RESULT, None)


def _sign_of_life(paths: RunPaths) -> float:
    """When the plan, the metrics or a log was last written."""
    return max(written(path) or 0.0 for path in (paths.plan, paths.metrics, *paths.logs.glob("*.log")))


# A running attempt ---------------------------------------------------------------------------------------------------


def _live(attempt: Attempt, tail: list[metrics.Event], steps: object) -> Live:
    """The stage of a running attempt, its last sign of life, and what is wrong with it."""
    quiet_s = max(0.0, time.time() - _sign_of_life(attempt.paths))
    restarts = sum(1 for _ in attempt.paths.failures.glob("restart-*/"))
    last = tail[-1] if tail else {}
    if not tail:
        stage = _start_stage(attempt)
    elif last.get("event") == "end" or (last.get("event") == "step" and last.get("step") == steps):
        stage = "all steps are done: it evaluates, saves and writes the result"
    else:
        stage = "compiling before the first step" if last.get("event") == "start" else "training"
    return Live(stage=stage, quiet_s=round(quiet_s, 1), restarts=restarts, notes=[*_notes(attempt, tail)])


def _start_stage(attempt: Attempt) -> str:
    """The stage before the first line of metrics, or of a command, which writes none."""
    paths = attempt.paths
    if dig(attempt.plan, "recipe", "command") and paths.rank_log(0).exists():
        return "the command runs"
    return next((stage for name, stage in _STAGES if (paths.folder / name).exists()), "the nodes start")


def _notes(attempt: Attempt, tail: list[metrics.Event]) -> Iterator[str]:
    for path in sorted(attempt.paths.failures.glob("*.json")):
        lost = re.fullmatch(r"node-\d+-lost-(\d{1,7})", path.stem)
        yield f"lost: node {lost[1]}" if lost else f"failed: {path.stem}"
    for event in [event for event in tail if event.get("event") == "slow"][-_SLOW:]:
        yield f"slow: rank {event.get('rank')} on {event.get('node')}, {event.get('times')} times the median rank"
    yield from metrics.result_warnings(tail)
    if asked := stop_requests(attempt.paths.folder):
        yield f"asked to save and end ({asked[0][:40]})"


# Over several attempts -------------------------------------------------------------------------------------------


class Watched:
    """A run that is watched over several attempts."""

    ask_s = 15.0
    """Seconds between two questions to Slurm's controller, which all users share."""
    next_s = 45.0
    """Seconds between the end of an attempt and the next one's place in the queue."""
    unknown_s = 600.0
    """A compiler may be silent for some minutes."""

    def __init__(self, run: Path) -> None:
        self.run, self.slurm = run, Slurm()
        self._asked = time.monotonic()
        self._since: float | None = None

    def look(self, *, closely: bool = False) -> State:
        """The current state; asks Slurm at most four times a minute."""
        if time.monotonic() > self._asked + self.ask_s:
            self.slurm, self._asked = Slurm(), time.monotonic()
        return status(self.run, self.slurm, closely=closely)

    def over(self, seen: State) -> bool:
        """Whether the run is over; the next attempt may enter the queue some seconds after the previous one."""
        now, wait = time.monotonic(), 0.0
        if seen.state in (QUEUED, RUNNING):
            self._since = None
            return False
        if seen.state == NO_RESULT:
            wait = self.unknown_s
        elif seen.goes_on and not self.slurm.is_absent:
            wait = self.next_s
        self._since = self._since or now
        return now >= self._since + wait


# What stopped a run --------------------------------------------------------------------------------------------------

TIME_LIMIT, PREEMPTION, REQUEUE, TERM = "the time limit", "preemption", "scontrol requeue", "SIGTERM"
NODE_FAILURE = "a node failure"
_BY_STATE = {
    "TIMEOUT": TIME_LIMIT,
    "PREEMPTED": PREEMPTION,
    "NODE_FAIL": NODE_FAILURE,
    "DEADLINE": "its deadline",
    "CANCELLED": "scancel",
    "OUT_OF_MEMORY": "the memory limit",
}
_EARLY_S = 120  # Slurm may send a signal a minute early, and counts time limits in minutes
_CLOCKS_S = 10.0  # between the clocks of a node and of the disk
# srun also cancels a step after a task has failed; then the batch script continues and writes a result.
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) (\d+)\S{0,60} ON \S{1,300} CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)"
    r"(?: DUE TO ([A-Z ]{1,40}\b))?"
)
_DUE_TO = {
    None: "scancel",
    "TIME LIMIT": TIME_LIMIT,
    "PREEMPTION": PREEMPTION,
    "NODE FAILURE": NODE_FAILURE,
    "JOB REQUEUE": REQUEUE,
}


class Stop(NamedTuple):
    """What stopped a run, and when."""

    reason: str
    at: str

    @property
    def by_wish(self) -> bool:
        """Whether somebody, or a known limit, asked for the end."""
        return self.reason not in (NODE_FAILURE, "the memory limit")

    @property
    def by_slurm(self) -> bool:
        """Whether Slurm itself gave this reason."""
        return self.reason in (REQUEUE, *_BY_STATE.values())


def stop_of_job(text: str, *, now: float, grace: int) -> Stop:
    """The stop, from `signal=NAME at=SECONDS end=SECONDS restarts=COUNT` and, if Slurm answered, `scontrol show job`.

    SIGUSR1 about `grace` seconds before the end means the time limit.
    """
    fields = slurm.fields(text)
    numbers = {name: int(value) for name, value in fields.items() if re.fullmatch("[0-9]{1,11}", value)}
    at, end = numbers.get("at") or now, numbers.get("end", math.inf)
    name, state = fields.get("signal") or "TERM", slurm.end_state(fields)
    if state in _BY_STATE:
        reason = _BY_STATE[state]
    elif at >= end - 1 or (name == "USR1" and end - at <= grace + _EARLY_S):
        reason = TIME_LIMIT
    elif numbers.get("Restarts", 0) > numbers.get("restarts", math.inf):
        reason = REQUEUE
    else:
        # An ending job without another reason was cancelled; a job that still runs only got a signal.
        reason = "scancel" if state == "COMPLETING" else f"SIG{name}"
    return Stop(reason, utc(at))


def reason_of_state(state: str) -> str:
    """What stopped a job with this sacct state, such as `CANCELLED by 1000`; empty if it ended by itself."""
    return _BY_STATE.get(state.partition(" ")[0], "")


def stop_requests(attempt: Path) -> list[str]:
    """Who asked an attempt to end: `dray stop`, or the signals that its batch script received."""
    with suppress(OSError):
        return files.read(attempt / run_folder.STOP).decode(errors="replace").splitlines()
    return []


def stop_in_logs(attempt: Path, job: int, began: float) -> Stop | None:
    """What ended an attempt without a result, from Slurm's messages in its logs.

    Slurm shows `dray stop` as scancel. Messages from before the attempt `began` belong to earlier attempts. An array
    names its tasks' logs, and a job that follows another writes into that one's log.
    """
    logs = (*sorted(attempt.parent.glob("job-*.log")), *(attempt / name for name in _SLURM_LOGS))
    for line in (line for log in logs for line in files.tail(log)):
        found = _CANCELLED.search(line[:1000])
        if not found or found[3] not in _DUE_TO or job not in (0, int(found[1])):
            continue
        with suppress(ValueError, OverflowError):
            at = time.mktime(time.strptime(found[2], "%Y-%m-%dT%H:%M:%S"))
            if at >= began - _CLOCKS_S:
                by_user = run_folder.BY_USER in stop_requests(attempt)
                return Stop(run_folder.BY_USER if by_user else _DUE_TO[found[3]], utc(at))
    return None


def utc(seconds: float | None = None) -> str:
    """The time in UTC, as in result.json."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
