"""The state of a run: whether it waits, runs or has ended, how far it is, and how it ended.

Only `status` decides, from the run's files, Slurm's queue, and the run's process on this machine.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dray.contract import files, processes, run_folder, scratch
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError
from dray.runs import metrics, startup, stop
from dray.runs.cost import Spent
from dray.runs.slurm import JUST_S, Job, Slurm
from dray.runs.startup import Startup
from dray.runs.stop import Stop, utc
from dray.runs.store import Attempt, Run, RunPaths, Table, dig, is_run, last_attempt, reason, written

QUEUED, RUNNING, DONE, FAILED, STOPPED, LOST, NO_RESULT = STATES = (
    "queued", "running", "done", "failed", "stopped", "lost", "no result",
)  # fmt: skip
Kind = Literal["queued", "starting", "running", "ended", "unknown"]
FRESH_S = 120.0
"""A run whose files changed within this time is alive: the trainer touches its lease every 10 s, and NFS caches a
file's time for up to a minute."""
AT_STEP = "at step "
"""With what the note of a loss that jumped or is not finite begins."""
_STAGES = (
    (run_folder.rank_log(0), "ranks load the data and build the model"),
    (run_folder.PREFLIGHT, "preflight, then the launcher starts the ranks"),
    (run_folder.RENDEZVOUS, "rendezvous: the first node waits for the others"),
    (run_folder.node_log(0), "nodes start the image"),
)
"""What happens before the first line of metrics, by the newest of these files."""

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


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
    command: bool = False
    """Whether a command runs instead of dray's trainer."""
    job: _Count | None = None
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

    kind: Annotated[Kind, Field(exclude=True)] = "ended"
    """What has the run: a waiting job, a job before its attempt, a job or process with an attempt, nothing; or
    `unknown`, if this machine cannot tell, because of `unclear`."""
    unclear: Annotated[str, Field(exclude=True)] = ""
    paths: Annotated[RunPaths | None, Field(exclude=True)] = None
    """The attempt; None before the first."""
    slurm_job: Annotated[Job | None, Field(exclude=True)] = None
    """The job that has the run."""
    cluster: Annotated[str, Field(exclude=True)] = ""
    """The job's cluster, if Slurm knows several; empty for this machine's cluster."""
    process: Annotated[int, Field(exclude=True)] = 0
    """The process that has the run, on this machine."""
    path: Annotated[Path, Field(exclude=True)] = Path()
    """The run folder; its name in `folder` is printable."""

    @property
    def where(self) -> str:
        """The job or process that has the run, in words."""
        if self.slurm_job:
            return f"job {self.slurm_job.id}, {self.slurm_job.state}"
        return f"process {self.process}" if self.process else self.unclear


def status(run: Run | Path, slurm: Slurm | None = None, *, closely: bool = False) -> State:
    """The state of a run, or of one attempt by its folder. Pass one `slurm` for many runs: it is asked once.

    Looked at `closely`, a running attempt has its stage, its nodes and its start.
    """
    number = None
    if isinstance(run, Path):
        folder = run.absolute()
        if not is_run(folder):
            paths = last_attempt(folder)
            folder, number = paths.run, paths.attempt
        run = Run(folder)
    attempts = [attempt for attempt in run.attempts if number in (None, attempt.number)]
    look = _Look(run, attempts[-1] if attempts else None, slurm or Slurm())
    look.decide()
    fields = look.of_attempt(look.attempt, closely=closely) if look.attempt else look.before()
    fields |= {"run": run.name, "folder": str(run.folder), "warnings": run.warnings}
    decided: Table = {
        "kind": look.kind, "unclear": look.unclear, "slurm_job": look.job, "cluster": look.cluster,
        "process": look.process, "path": run.folder, "paths": look.attempt.paths if look.attempt else None,
    }  # fmt: skip
    return _state(printable(fields) | decided)


def _state(fields: Table) -> State:
    """The state, without the values that a damaged file has instead of others."""
    try:
        return State(**fields)
    except ValidationError as wrong:
        damaged = {str(error["loc"][0]) for error in wrong.errors()}
    valid = {name: value for name, value in fields.items() if name not in damaged}
    return State(**valid)


class _Look:
    """One look at a run."""

    def __init__(self, run: Run, attempt: Attempt | None, slurm: Slurm) -> None:
        self.run, self.attempt, self.slurm = run, attempt, slurm
        self.kind: Kind = "ended"
        self.unclear, self.process = "", 0
        self.job: Job | None = None
        # Another user's file does not choose a cluster: Slurm does not list their jobs here.
        self.cluster = run.cluster if run.owner == os.geteuid() else ""
        begun = run.job and run.job.id in {attempt.job_id for attempt in run.attempts}
        self.queued = None if begun else run.job
        """The submitted job that has not begun an attempt yet."""

    @property
    def _ended(self) -> float | None:
        """When the attempt wrote its result, valid or not."""
        return self.attempt.ended if self.attempt else None

    # Who has the run ----------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Set `kind`, and the job or process that has the run."""
        attempt = self.attempt
        if attempt:
            over = self._ended is not None and not self.queued and not attempt.goes_on
        else:
            over = self.run.job is not None and self.run.job.stopped is not None
        if not self.queued and not (attempt and attempt.job_id):
            self._decide_by_process()
            over = True
        if self.kind == "ended" and not self.unclear:
            try:
                if job := self._find_job():
                    self._decide_by_job(job)
                elif not over:
                    self.unclear = self._unlisted()
            except DrayError as silent:
                self.unclear = "" if over else silent.problem
        if self.unclear:
            self.kind = "unknown"

    def _find_job(self) -> Job | None:
        """The job that has the run. Slurm itself may requeue an ended one, as after a preemption."""
        ids: dict[str, float] = {}
        folders = {str(self.run.folder)}
        if self.attempt:
            ids[self.attempt.job_id] = self._ended or self.attempt.began
            folders.add(str(self.attempt.plan.get("run_folder")))
        if self.queued:
            ids[self.queued.id] = self.queued.time
        return self.slurm.job_of(ids, folders, self.cluster)

    def _decide_by_job(self, job: Job) -> None:
        attempt, ended = self.attempt, self._ended
        if job.waits and not self._is_new():
            self.kind, self.job = "queued", job
            return
        again = ended is not None and attempt and (attempt.goes_on or (job.start or 0.0) > ended)
        if attempt is None or job.id != attempt.job_id or again:  # an allocation by salloc outlives an attempt
            self.kind, self.job = "starting", job
        elif ended is None:  # with a result, the run has ended, and Slurm is cleaning up
            self.kind, self.job = "running", job

    def _is_new(self) -> bool:
        """Whether the attempt started after Slurm was asked, and still runs."""
        attempt = self.attempt
        return attempt is not None and self.slurm.is_older(attempt.began, self.cluster) and self._ended is None

    def _unlisted(self) -> str:
        """Why the run may be active although Slurm here does not list its job; empty if it is not."""
        if self.run.owner != os.geteuid():  # squeue was asked for this user's jobs only
            return f"the job belongs to user {self.run.owner}"
        if self.queued and self.slurm.is_older(self.queued.time, self.cluster, margin_s=JUST_S):
            return f"job {self.queued.id} was submitted a moment ago, so squeue does not list it yet"
        if self._is_new():
            return "the attempt began a moment ago, after squeue was asked"
        cluster = self.attempt.facts.get("cluster", "") if self.attempt and not self.cluster else ""
        if cluster and cluster != self.slurm.cluster:  # another cluster with the same disk
            return f"the job is on cluster {cluster}, but Slurm here is {self.slurm.cluster or 'without a name'}"
        return ""

    def _decide_by_process(self) -> None:
        """Decide of a run without Slurm."""
        if self.attempt is None or self._ended is not None:
            return
        process = _process(self.attempt.paths)
        if process is None or not processes.here(process):
            self.unclear = "it was started on another machine, or before this machine last booted"
        elif not processes.gone(process):
            self.kind, self.process = "running", process[2]
        elif scratch.held(self.attempt.plan.get("scratch")):
            self.unclear = "the process that started it ended, but its runner is alive"

    # What it is called --------------------------------------------------------------------------------------------

    def before(self) -> Table:
        """What is told of a submitted run before its first attempt."""
        job = self.run.job
        if job is None:
            return {"state": NO_RESULT}
        fields: Table = {"job": job.job, "job_id": job.id, "started": utc(job.time)}
        for word in job.argv:
            if word.startswith("--job-name="):
                fields["recipe"] = word.partition("=")[2]
        match self.kind:
            case "queued":
                seen: Table = {"state": QUEUED, "waiting": self.job}
            case "starting":
                seen = {"state": RUNNING, "live": {"stage": "the job is planning the run"}}
            case "ended" if job.stopped:
                why = f"dray stop cancelled job {job.id} in the queue; the run never started"
                seen = {"state": STOPPED, "why": why}
            case "ended":
                why = f"job {job.id} ended before its first attempt: see its output, job-{job.id}.log"
                seen = {"state": LOST, "why": why}
            case _ if self.slurm.is_absent:
                why = f"this machine has no Slurm, so it cannot tell whether job {job.id} waits, runs or has ended"
                seen = {"state": NO_RESULT, "why": why}
            case _:
                seen = {"state": QUEUED}
        return fields | seen

    def of_attempt(self, attempt: Attempt, *, closely: bool) -> Table:
        """What is told of an attempt."""
        state, stopped = self._name(attempt)
        plan, job, result = attempt.plan, self.job, attempt.result
        fields: Table = {
            "state": state,
            "recipe": dig(plan, "recipe", "name"),
            "command": bool(dig(plan, "recipe", "command")),
            "job": job.number if job else plan.get("job") or None,
            "job_id": (job.id if job else attempt.job_id) or None,
            "attempt": attempt.number,
            "attempts": len(self.run.attempts),
            "nodes": attempt.nodes,
            "ranks": dig(plan, "world", "size"),
            "started": utc(attempt.began),
            "steps": dig(plan, "recipe", "train", "steps"),
        }
        if job and state == QUEUED:
            fields["waiting"] = job
        if result:
            if state == RUNNING:
                fields["live"] = {"stage": "the job is planning the next attempt"}
            return fields | _result(result, self.run, closely=closely) | {"goes_on": attempt.goes_on}
        if stopped:
            fields |= {"why": stopped.reason, "finished": stopped.at}
        tail: list[metrics.Event] = []
        try:
            tail = metrics.tail(attempt.paths.metrics)
            if fields["steps"] is None:  # it counts epochs
                fields["steps"] = metrics.first(attempt.paths.metrics).get("steps")
        except OSError as wrong:
            self.run.warnings.append(f"{attempt.paths.metrics} cannot be read: {reason(wrong)}")
        if closely and state != QUEUED:
            fields["startup"] = startup.read(attempt.paths, attempt.nodes)
            fields["live"] = _live(attempt, tail, fields["steps"])
        step = next((event for event in reversed(tail) if event.get("event") == "step"), {})
        fields |= {name: step.get(name) for name in ("step", "loss", "tokens_per_s")}
        at, left = metrics.number(step, "time"), metrics.number(step, "seconds_left")
        if at is not None and left is not None and state == RUNNING:
            fields["left_s"] = round(max(0.0, left - max(0.0, time.time() - at)), 1)
        return fields

    def _name(self, attempt: Attempt) -> tuple[str, Stop | None]:
        """The state's name, and what stopped an attempt that left no result."""
        ended, told = self._ended, dig(attempt.result, "status")
        by_result = told if told in (DONE, FAILED, STOPPED) else NO_RESULT
        if attempt.number < self.run.attempts[-1].number:  # Slurm's job belongs to a later attempt
            return (by_result, None) if ended else _lost(attempt)
        if self.kind == "queued":
            return QUEUED, None
        if (self.job and not self.job.by_salloc) or self.kind == "starting" or self.process:
            return RUNNING, None
        if ended:
            waits = self.kind == "unknown" and self.queued and not self.slurm.is_absent
            return QUEUED if waits else by_result, None
        if self.kind == "ended":
            return _lost(attempt)
        return _by_files(attempt)  # an salloc allocation outlives its runs


def _result(result: Table, run: Run, *, closely: bool) -> Table:
    """What the result tells."""
    cause = dig(result, "cause", "why")
    fields: Table = {
        "finished": result.get("finished"),
        "step": result.get("steps"),
        "loss": result.get("loss_last"),
        "tokens_per_s": result.get("tokens_per_s"),
        "exit_code": result.get("exit_code"),
        "why": cause.partition("\n")[0] if isinstance(cause, str) else result.get("reason"),
        "spent": result.get("spent"),
    }
    if closely:
        fields["startup"] = result.get("startup")
        warnings = result.get("warnings")
        run.warnings += map(str, warnings) if isinstance(warnings, list) else ()
    return fields


def _lost(attempt: Attempt) -> tuple[str, Stop | None]:
    """The state of an attempt that is gone: stopped if somebody asked for it, else lost."""
    stopped = stop.of_files(attempt.paths.folder, attempt.job, attempt.began)
    if stopped is None:
        reasons = {run_folder.BY_USER: run_folder.BY_USER, "TERM": stop.TERM}
        for line in stop.asked(attempt.paths.folder):
            if line in reasons:
                stopped = Stop(reasons[line], utc(written(attempt.paths.stop) or 0.0))
    return (STOPPED, stopped) if stopped and stopped.by_wish else (LOST, None)


def _by_files(attempt: Attempt) -> tuple[str, Stop | None]:
    """The state of an attempt without a result, by its files alone."""
    paths = attempt.paths
    held = scratch.held(attempt.plan.get("scratch"))
    if held:
        return RUNNING, None
    if held is False or stop.of_files(paths.folder, attempt.job, attempt.began):
        return _lost(attempt)
    folder = dig(attempt.plan, "recipe", "checkpoint", "folder")
    checkpoints = Path(folder) if isinstance(folder, str) and folder else paths.checkpoints
    places = (paths.metrics, checkpoints / "lease.json", paths.node_log(0), paths.rank_log(0), paths.plan)
    if max(written(place) or 0.0 for place in places) > time.time() - FRESH_S:
        return RUNNING, None
    return _lost(attempt) if "TERM" in stop.asked(paths.folder) else (NO_RESULT, None)


# A running attempt ---------------------------------------------------------------------------------------------------


def _live(attempt: Attempt, tail: list[metrics.Event], steps: object) -> Live:
    """The stage of a running attempt, its last sign of life, and what is wrong with it."""
    paths = attempt.paths
    newest = max(written(path) or 0.0 for path in (paths.metrics, *paths.logs.glob("*.log")))
    quiet = round(max(0.0, time.time() - newest), 1) if newest else None
    restarts = [written(path) or 0.0 for path in paths.failures.glob("restart-*/")]
    last = tail[-1] if tail else {}
    if not tail or (metrics.number(last, "time") or 0.0) < max(restarts, default=0.0):
        stage = "all ranks are restarting" if restarts else _start_stage(attempt)
    elif last.get("event") == "end" or (last.get("event") == "step" and last.get("step") == steps):
        stage = "all steps are done: it evaluates, saves and writes the result"
    else:
        stage = "compiling before the first step" if last.get("event") == "start" else "training"
    return Live(stage=stage, quiet_s=quiet, restarts=len(restarts), notes=[*_notes(attempt, tail)])


def _start_stage(attempt: Attempt) -> str:
    """The stage before the first line of metrics, or of a command, which writes none."""
    if dig(attempt.plan, "recipe", "command") and attempt.paths.rank_log(0).exists():
        return "the command runs"
    first = "Slurm starts the nodes" if attempt.job else "the nodes start"
    return next((stage for name, stage in _STAGES if (attempt.paths.folder / name).exists()), first)


def _notes(attempt: Attempt, tail: list[metrics.Event]) -> Iterator[str]:
    for path in sorted(attempt.paths.failures.glob("*.json")):
        if found := re.fullmatch(r"node-\d+-lost-(\d{1,7})", path.stem):
            number = int(found[1])
            yield f"lost: {attempt.nodes[number] if number < len(attempt.nodes) else f'node {number}'}"
        else:
            yield f"failed: {path.stem}"
    slow: dict[object, str] = {}
    for event in tail:
        if event.get("event") == "slow" and (times := metrics.number(event, "times")):
            rank = str(event.get("rank"))
            slow[rank] = f"slow: rank {rank} on {event.get('node')}, {times:.2f} times the median rank"
        elif event.get("event") == "divergence":
            yield f"{AT_STEP}{event.get('last_step')}: {event.get('why')}"
    yield from slow.values()
    yield from metrics.unsaved(tail)
    if asked := stop.asked(attempt.paths.folder):
        yield f"asked to save and end ({asked[0][:40]})"


def _process(paths: RunPaths) -> list[Any] | None:
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(files.read(paths.process)):
            case [str(), str(), int(), str()] as found if found[2] > 1:
                return list(found)
    return None


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
        self._ended: float | None = None
        self._unknown: float | None = None

    def look(self, *, closely: bool = False) -> State:
        """The current state; asks Slurm at most four times a minute."""
        if time.monotonic() > self._asked + self.ask_s:
            self.slurm, self._asked = Slurm(), time.monotonic()
        return status(self.run, self.slurm, closely=closely)

    def over(self, seen: State) -> bool:
        """Whether the run is over; the next attempt may enter the queue some seconds after the previous one."""
        now = time.monotonic()
        if seen.state == NO_RESULT:
            self._unknown = self._unknown or now
            return now >= self._unknown + self.unknown_s
        self._unknown = None
        if seen.state in (QUEUED, RUNNING):
            self._ended = None
            return False
        self._ended = self._ended or now
        return not seen.goes_on or self.slurm.is_absent or now >= self._ended + self.next_s
