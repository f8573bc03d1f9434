"""The state of a run: whether it waits, runs or has ended, how far it is, and how it ended.

Only `status` decides, from the run's files, Slurm's queue, and the run's process on this machine.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dray.contract import files, processes, run_folder, scratch
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError, duration
from dray.runs import metrics, startup, stop
from dray.runs.cost import Spent
from dray.runs.slurm import JUST_S, Job, Slurm, meaning
from dray.runs.startup import Startup
from dray.runs.stop import Stop, utc
from dray.runs.store import OR_NONE, Attempt, Run, RunPaths, Table, dig, is_run, last_attempt, reason, written

QUEUED, RUNNING, DONE, FAILED, STOPPED, LOST, NO_RESULT = STATES = (
    "queued", "running", "done", "failed", "stopped", "lost", "no result",
)  # fmt: skip
Kind = Literal["queued", "starting", "running", "ended", "unknown"]
FRESH_S = 120.0
"""A run whose files changed within this time is alive: the trainer touches its lease every 10 s, and NFS caches a
file's time for up to a minute."""
AT_STEP = "at step "
"""With what the note of a loss that jumped or is not finite begins."""
_MOST_NOTES = 16  # a run of thousands of ranks may name each
_KILLED_S = 45.0  # the same after SIGTERM: Slurm kills the job after KillWait, 30 s by default


class Waiting(BaseModel):
    """The waiting job of a run, as Slurm shows it."""

    model_config = ConfigDict(frozen=True)

    job: int
    id: str = ""
    """The id for Slurm's commands."""
    state: str
    reason: str
    meaning: str = ""
    """The reason in plain words; empty if it is unknown."""
    start: str | None = None
    """The start that Slurm expects, or the earliest possible."""


class Node(BaseModel):
    """A node, from the files of its ranks and its runner."""

    model_config = ConfigDict(frozen=True)

    name: str
    ranks: list[int]
    quiet_s: float | None = None
    """Seconds since one of its logs was last written; None without logs."""
    notes: list[str] = []
    """Failures and slow ranks."""


class Live(BaseModel):
    """A running attempt."""

    model_config = ConfigDict(frozen=True)

    stage: str
    nodes: list[Node] = []
    quiet_s: float | None = None
    """Seconds since any of its files was last written."""
    restarts: int = 0
    notes: list[str] = []
    """Slow ranks, failed saves, loss jumps, and a request to end."""


class State(BaseModel):
    """One run at the time of the query."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    run: str
    folder: str
    state: str
    """queued, running, done, failed, stopped, lost (the job ended without a result), or `no result` (it runs, or was
    killed before it could write one)."""
    recipe: str | None = None
    command: bool = False
    """Whether a command runs instead of dray's trainer."""
    job: int | None = None
    job_id: str | None = None
    """The id for Slurm's commands: 12, or 12_3 for an array task."""
    attempt: int | None = None
    attempts: int = 0
    nodes: list[str] = []
    ranks: int | None = None
    started: str | None = None
    """When the first attempt began, or, without one, when the run was submitted."""
    attempt_started: str | None = None
    finished: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    exit_code: int | None = None
    why: str | None = None
    """What failed, or what stopped the run."""
    goes_on: bool = False
    """Whether another attempt follows the last one."""
    waiting: Waiting | None = None
    live: Live | None = None
    """Details of a running attempt, if requested."""
    startup: Annotated[Startup | None, OR_NONE] = None
    """How long each part of the last attempt's start took, if requested."""
    spent: Annotated[Spent | None, OR_NONE] = None
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

    run_path: Annotated[Path | None, Field(exclude=True)] = None

    @property
    def path(self) -> Path:
        """The run folder; its name in `folder` is printable."""
        return self.run_path or Path(self.folder)

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
    fields = look.of_attempt(closely=closely) if look.attempt else look.before()
    own: Table = {"run": run.name, "folder": str(run.folder), "warnings": run.warnings}
    return State(
        **printable(own | fields), kind=look.kind, unclear=look.unclear, slurm_job=look.job, cluster=look.cluster,
        process=look.process, run_path=run.folder, paths=look.attempt.paths if look.attempt else None,
    )  # fmt: skip


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
        attempt, ended = self.attempt, self._ended
        over = ended is not None and not self.queued and not (attempt and attempt.goes_on)
        over = over or (attempt is None and self.run.job is not None and self.run.job.stopped is not None)
        if not self.queued and not (attempt and attempt.job_id):
            self._decide_by_process()
            if self.kind != "ended":
                return
            over = True
        try:
            if job := self._find_job():
                self._decide_by_job(job)
            elif not over:
                self.unclear = self._unlisted()
        except DrayError as silent:
            self.unclear = "" if over else silent.finding.problem
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
        attempt = self.attempt
        if job.waits and not self._is_new():
            self.kind, self.job = "queued", job
            return
        ended = self._ended
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
            here = self.slurm.cluster or "without a name"
            return f"the job is on cluster {cluster}, but Slurm here is {here}"
        return ""

    def _decide_by_process(self) -> None:
        """Decide of a run without Slurm."""
        if self.attempt is None or self._ended is not None:
            return
        process = _process(self.attempt.paths)
        if process is None:
            self.unclear = "no file names the process that runs it"
        elif not processes.here(process):
            self.unclear = "it was started on another machine, or before this machine last booted"
        elif not processes.gone(process):
            self.kind, self.process = "running", process[2]
        elif scratch.held(self.attempt.plan.get("scratch")):
            self.unclear = "the process that started it ended, but its runner is alive"
        if self.unclear:
            self.kind = "unknown"

    # What it is called --------------------------------------------------------------------------------------------

    def before(self) -> Table:
        """What is told of a submitted run before its first attempt."""
        job = self.run.job
        if job is None:
            return {"state": NO_RESULT}
        names = [word.partition("=")[2] for word in job.argv if word.startswith("--job-name=")]
        fields: Table = {"recipe": next(iter(names), None), "job": job.job, "job_id": job.id, "started": _utc(job.time)}
        if self.kind == "queued" and self.job:
            return fields | {"state": QUEUED, "waiting": _waiting(self.job)}
        if self.kind == "starting":
            return fields | {"state": RUNNING, "live": {"stage": "the job is planning the run"}}
        if self.kind == "ended":
            stopped = f"dray stop cancelled job {job.id} in the queue; the run never started"
            lost = f"job {job.id} ended before its first attempt: see its output, job-{job.id}.log"
            return fields | ({"state": STOPPED, "why": stopped} if job.stopped else {"state": LOST, "why": lost})
        if self.slurm.is_absent:
            why = f"this machine has no Slurm, so it cannot tell whether job {job.id} waits, runs or has ended"
            return fields | {"state": NO_RESULT, "why": why}
        return fields | {"state": QUEUED}

    def of_attempt(self, *, closely: bool) -> Table:
        """What is told of an attempt."""
        attempt = self.attempt
        assert attempt
        state, stopped = self._state(attempt)
        plan, job = attempt.plan, self.job
        nodes = dig(plan, "world", "nodes")
        names = [str(dig(node, "name")) for node in nodes] if isinstance(nodes, list) else []
        first = written(RunPaths(self.run.folder).plan) if attempt.number > 1 else None
        fields: Table = {
            "state": state,
            "recipe": _text(dig(plan, "recipe", "name")),
            "command": bool(dig(plan, "recipe", "command")),
            "job": (job.number if job else metrics.whole(plan, "job")) or None,
            "job_id": (job.id if job else attempt.job_id) or None,
            "attempt": attempt.number,
            "attempts": len(self.run.attempts),
            "nodes": names,
            "ranks": metrics.whole(dig(plan, "world"), "size"),
            "started": _utc(first or attempt.began),
            "attempt_started": _utc(attempt.began),
            "steps": metrics.whole(dig(plan, "recipe", "train"), "steps"),
            "waiting": _waiting(job) if job and state == QUEUED else None,
        }
        result = attempt.result
        if result and isinstance(result.get("status"), str):
            fields |= {"goes_on": attempt.goes_on, **_result(result, self.run, closely=closely)}
            return fields | ({"live": {"stage": "the job is planning the next attempt"}} if state == RUNNING else {})
        if stopped:
            fields |= {"why": stopped.reason, "finished": stopped.at}
        tail = list[metrics.Event]()
        try:
            tail = metrics.tail(attempt.paths.metrics) if closely else metrics.tail(attempt.paths.metrics, 4096)
            if fields["steps"] is None:  # it counts epochs
                fields["steps"] = metrics.whole(metrics.first(attempt.paths.metrics), "steps")
        except OSError as wrong:
            self.run.warnings.append(f"{attempt.paths.metrics} cannot be read: {reason(wrong)}")
        if closely and state != QUEUED:
            fields["startup"] = startup.read(attempt.paths, names)
            fields["live"] = _live(attempt, names, tail, fields["steps"])
        step = next((event for event in reversed(tail) if event.get("event") == "step"), {})
        fields["step"] = metrics.whole(step, "step")
        fields |= {name: metrics.number(step, name) for name in ("loss", "tokens_per_s")}
        at, left = metrics.number(step, "time"), metrics.number(step, "seconds_left")
        if at is not None and left is not None and state == RUNNING:
            fields["left_s"] = round(max(0.0, left - max(0.0, time.time() - at)), 1)
        return fields

    def _state(self, attempt: Attempt) -> tuple[str, Stop | None]:
        """The state's name, and what stopped an attempt that left no result."""
        ended, status = self._ended, dig(attempt.result, "status")
        by_result = (status if status in (DONE, FAILED, STOPPED) else NO_RESULT), None
        job, kind = self.job, self.kind
        if attempt.number < self.run.attempts[-1].number:  # Slurm's job belongs to a later attempt
            return by_result if ended else _lost(attempt)
        if kind == "queued":
            return QUEUED, None
        if (job and not job.by_salloc) or kind == "starting" or self.process:
            return RUNNING, None
        if ended:
            waits = kind == "unknown" and self.queued and not self.slurm.is_absent
            return (QUEUED, None) if waits else by_result
        return _lost(attempt) if kind == "ended" else _by_files(attempt)  # an salloc allocation outlives its runs


def _result(result: Table, run: Run, *, closely: bool) -> Table:
    """What the result tells."""
    cause = dig(result, "cause", "why")
    fields: Table = {
        "finished": _text(result.get("finished")),
        "step": metrics.whole(result, "steps"),
        "loss": metrics.number(result, "loss_last"),
        "tokens_per_s": metrics.number(result, "tokens_per_s"),
        "exit_code": metrics.whole(result, "exit_code"),
        "why": _text(cause.partition("\n")[0] if isinstance(cause, str) else result.get("reason")),
        "spent": result.get("spent"),
    }
    if closely:
        warnings = result.get("warnings")
        own = [str(text) for text in warnings] if isinstance(warnings, list) else []
        fields |= {"startup": result.get("startup"), "warnings": [*run.warnings, *own]}
    return fields


def _lost(attempt: Attempt) -> tuple[str, Stop | None]:
    """The state of an attempt that is gone: stopped if somebody asked for it, else lost."""
    stopped = stop.of_files(attempt.paths.folder, attempt.job, attempt.began)
    if stopped is None:
        reasons = {run_folder.BY_USER: run_folder.BY_USER, "TERM": stop.TERM}
        known = [reasons[line] for line in stop.asked(attempt.paths.folder) if line in reasons]
        stopped = Stop(known[-1], utc(written(attempt.paths.stop) or 0.0)) if known else None
    return (STOPPED, stopped) if stopped and stopped.by_wish else (LOST, None)


def _by_files(attempt: Attempt) -> tuple[str, Stop | None]:
    """The state of an attempt without a result, by its files alone."""
    held = scratch.held(attempt.plan.get("scratch"))
    if held is not None:
        return (RUNNING, None) if held else _lost(attempt)
    if stop.of_files(attempt.paths.folder, attempt.job, attempt.began):
        return _lost(attempt)
    paths, folder = attempt.paths, dig(attempt.plan, "recipe", "checkpoint", "folder")
    checkpoints = Path(folder) if isinstance(folder, str) and folder else paths.checkpoints
    places = (paths.metrics, checkpoints / "lease.json", paths.node_log(0), paths.rank_log(0), paths.plan)
    newest = max(written(place) or 0.0 for place in places)
    terminated = "TERM" in stop.asked(paths.folder)
    if newest > time.time() - (_KILLED_S if terminated else FRESH_S):
        return RUNNING, None
    return _lost(attempt) if terminated else (NO_RESULT, None)


# A running attempt ---------------------------------------------------------------------------------------------------


def _live(attempt: Attempt, names: list[str], tail: list[metrics.Event], steps: int | None) -> Live:
    """The stage of a running attempt and the state of its nodes."""
    paths = attempt.paths
    slow: dict[str, list[str]] = {}
    noted: list[str] = []
    for event in tail:
        if event.get("event") == "slow" and (times := metrics.number(event, "times")):
            node = str(event.get("node"))
            noted.append(f"slow: rank {event.get('rank')} on {node}, {times:.2f} times the median rank")
            slow.setdefault(node, []).append(noted[-1])
        elif event.get("event") == "divergence":
            noted.append(f"{AT_STEP}{metrics.whole(event, 'last_step')}: {str(event.get('why'))[:600]}")
    restarts = [path for path in paths.failures.glob(run_folder.restart("*").partition("/")[2]) if path.is_dir()]
    nodes = _nodes(attempt, names, slow)
    ages = [node.quiet_s for node in nodes if node.quiet_s is not None]
    if at := written(paths.metrics):
        ages.append(_age(at))
    quiet = min(ages, default=None)
    notes = [*noted[-_MOST_NOTES:], *metrics.unsaved(tail)]
    asked = stop.asked(paths.folder)
    notes += [f"asked to save and end ({asked[0][:40]})"] if asked else []
    if quiet is not None and quiet > FRESH_S:
        notes.append(f"no output for {duration(quiet)}")
    elif not dig(attempt.plan, "recipe", "command"):  # each rank logs each step
        for node_ in nodes:
            if node_.quiet_s is not None and node_.quiet_s > FRESH_S:
                node_.notes.append(f"silent for {duration(node_.quiet_s)}, unlike the others")
    restarted = max((written(path) or 0.0 for path in restarts), default=0.0)
    last = tail[-1] if tail else {}
    if not tail or (metrics.number(last, "time") or 0.0) < restarted:
        stage = "all ranks are restarting" if restarted else _start_stage(attempt)
    elif last.get("event") == "end" or (last.get("event") == "step" and last.get("step") == steps):
        stage = "all steps are done: it evaluates, saves and writes the result"
    else:
        stage = "compiling before the first step" if last.get("event") == "start" else "training"
    return Live(stage=stage, nodes=nodes, quiet_s=quiet, restarts=len(restarts), notes=notes)


def _age(at: float) -> float:
    return round(max(0.0, time.time() - at), 1)


def _start_stage(attempt: Attempt) -> str:
    """The stage before the first line of metrics, or of a command, which writes none."""
    paths, plan = attempt.paths, attempt.plan
    log = b""
    with suppress(OSError), files.open_regular(paths.node_log(0)) as file:
        log = file.read(1 << 18)
    proved = not plan.get("preflight") or b"dray: preflight took " in log
    stages = {
        "the command runs" if dig(plan, "recipe", "command") else "ranks load the data and build the model":
            paths.rank_log(0).exists(),
        "the launcher starts the ranks" if proved else "preflight": b"dray: cores of each rank: " in log,
        "rendezvous: the first node waits for the others": paths.rendezvous.exists(),
        "nodes check their copy of the image and start it" if plan.get("stage") else "nodes start the image":
            paths.node_log(0).exists(),
    }  # fmt: skip
    first = "Slurm starts the nodes" if plan.get("job") else "the nodes start"
    return next((stage for stage, reached in stages.items() if reached), first)


def _nodes(attempt: Attempt, names: list[str], slow: dict[str, list[str]]) -> list[Node]:
    ranks_per_node = min(metrics.whole(dig(attempt.plan, "world"), "ranks_per_node") or 1, 1024)
    failures = {path.name for path in attempt.paths.failures.glob("*.json")}
    found = []
    for number, name in enumerate(names):
        ranks = [*range(number * ranks_per_node, (number + 1) * ranks_per_node)]
        stems = [f"node-{number}", *(f"rank-{rank}" for rank in ranks)]
        newest = max(written(attempt.paths.logs / f"{stem}.log") or 0.0 for stem in stems)
        failed = [stem for stem in stems if f"{stem}.json" in failures]
        own = slow.get(name, [])[-_MOST_NOTES:]
        own += [f"failed: {', '.join(failed)}"] if failed else []
        own += ["lost"] if any(re.fullmatch(rf"node-\d+-lost-{number}\.json", file) for file in failures) else []
        quiet = _age(newest) if newest else None
        found.append(Node(name=name, ranks=ranks, quiet_s=quiet, notes=own))
    return found


def _process(paths: RunPaths) -> list[Any] | None:
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(files.read(paths.process)):
            case [str(), str(), int(), str()] as found if found[2] > 1:
                return list(found)
    return None


def _waiting(job: Job) -> Table:
    return {
        "job": job.number, "id": job.id, "state": job.state, "reason": job.reason, "meaning": meaning(job.reason),
        "start": _utc(job.start),
    }  # fmt: skip


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else utc(seconds)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


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
