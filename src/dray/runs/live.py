"""Decide whether a run waits, runs or has ended, from its folder, Slurm and its process on this machine.

Only this module decides; runs/look.py shows the decision.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dray.contract import files, processes, run_folder, scratch
from dray.contract.findings import ConfigError, DrayError
from dray.runs import metrics, queued
from dray.runs.named import cluster_of, id_of, is_run, job_of
from dray.runs.paths import RunPaths, attempts, last_attempt
from dray.runs.queued import Queued
from dray.runs.reading import Table, dig, require_version, table, written
from dray.runs.squeue import JUST_S, Job, Queue

Kind = Literal["queued", "starting", "running", "ended", "unknown"]


class State(NamedTuple):
    """The current state of a run."""

    kind: Kind
    run: Path
    paths: RunPaths | None = None
    """The last attempt; None if there is none."""
    job: Job | None = None
    cluster: str = ""
    """The cluster's name, if Slurm knows several; empty for this machine's cluster."""
    process: int = 0
    """The process that runs it on this machine."""
    why: str = ""
    """Why this machine cannot tell."""

    @property
    def where(self) -> str:
        """The job or process that has the run, in words."""
        if self.job:
            return f"job {self.job.id}, {self.job.state}"
        return f"process {self.process}" if self.process else self.why


class Left:
    """The files of an attempt, or of a run without one. Each file is read at most once, and only when needed, because
    lists have thousands of runs."""

    def __init__(self, run: Path, number: int, numbers: list[int]) -> None:
        self.run, self.number, self.numbers = run, number, numbers
        self.folder = f"{run}/{run_folder.attempt(number)}"  # a string: making a Path would take half of a list's time
        self.warnings: list[str] = []
        self.ended: float | None = None
        """When the result was written, valid or not."""
        self.result: Table | None = None
        self.look_again()

    def look_again(self) -> None:
        """Read the result, if it is written by now."""
        if self.ended is None and self.number:
            file = f"{self.folder}/{run_folder.RESULT}"
            self.ended = written(file)
            self.result = None if self.ended is None else table(file, self.warnings, require_version)

    @cached_property
    def plan(self) -> Table:
        """The plan as a table; empty without a plan."""
        return (table(f"{self.folder}/{run_folder.PLAN}", self.warnings) if self.number else None) or {}

    @cached_property
    def paths(self) -> RunPaths:
        """The paths of the attempt's files."""
        return RunPaths(self.run, self.number)

    @cached_property
    def began(self) -> float | None:
        """When the plan was written."""
        return written(f"{self.folder}/{run_folder.PLAN}")

    @property
    def goes_on(self) -> bool:
        """Whether the same job continues: requeued, or with other nodes."""
        return bool(dig(self.result, "next", "requeue") or dig(self.result, "next", "spare"))

    @cached_property
    def job(self) -> int:
        """The job number of the attempt; 0 without Slurm or if unknown."""
        return (metrics.whole(self.plan, "job") or job_of(self.folder)) if self.number else 0

    @cached_property
    def submitted(self) -> Queued | None:
        """The job that was submitted for the run."""
        return None if written(f"{self.run}/{run_folder.JOB}") is None else queued.read(self.run)

    @cached_property
    def queued(self) -> Queued | None:
        """The submitted job, unless it already started an attempt."""
        one = self.submitted
        if one is None or (one.task is None and one.job == self.job):
            return None
        begun = (id_of(f"{self.run}/{run_folder.attempt(number)}") for number in self.numbers)
        return None if one.id in begun else one

    @property
    def cancelled(self) -> bool:
        """Whether `dray stop` cancelled the job before it started."""
        return not self.number and self.submitted is not None and self.submitted.stopped is not None

    @cached_property
    def owner(self) -> int:
        """The user who owns the run."""
        with suppress(OSError):
            return os.lstat(self.folder if self.number else self.run).st_uid
        return os.geteuid()


def own(folder: Path) -> Path:
    """The run of this folder, or of this attempt's folder. Another user's run is refused: it may name any program."""
    run = folder if is_run(folder) else last_attempt(folder).run
    for path in (run, *([last_attempt(run).folder] if attempts(run) else [])):
        try:
            found, is_own = path.lstat(), files.is_own(path)
        except OSError as refused:  # for example a broken link
            raise ConfigError("the run cannot be read", where=path, found=refused.strerror) from refused
        if found.st_uid != os.geteuid() or not is_own:
            raise ConfigError(
                "the run belongs to another user, or others may write into it",
                where=path,
                wanted=f"a folder of user {os.geteuid()}",
                found=f"of user {found.st_uid}, mode {found.st_mode & 0o7777:04o}",
            )
    return run


def look(run: Path, queue: Queue | None = None) -> State:
    """The current state; pass one `queue` for many runs, so that Slurm is asked once."""
    numbers = attempts(run)
    return decide(Left(run, max(numbers, default=0), numbers), queue or Queue())


def decide(left: Left, queue: Queue) -> State:
    """Decide from the last attempt and from the job submitted for the next one."""
    here = None if left.job or left.queued else _here(left)
    if here and here.kind != "ended":
        return here
    # Another user's file does not choose a cluster: Slurm does not list their jobs here.
    cluster = left.submitted.cluster if left.submitted else ""
    cluster = cluster if cluster and left.owner == os.geteuid() else ""
    paths = left.paths if left.number else None
    why, over = "", here or left.cancelled or (left.ended is not None and not left.queued and not left.goes_on)
    try:
        if found := queue.job_of(_named(left), _folders(left), cluster):
            kind, job = _found(left, found, queue, cluster)
            return State(kind, left.run, paths, job, cluster)
        why = "" if over else _untold(left, queue, cluster)
    except DrayError as silent:
        why = "" if over else silent.finding.problem
    left.look_again()
    return State("unknown" if why else "ended", left.run, paths, cluster=cluster, why=why)


def _found(left: Left, job: Job, queue: Queue, cluster: str) -> tuple[Kind, Job | None]:
    """Decide from the job that has the run."""
    if job.waits and not _is_new(left, queue, cluster):
        return "queued", job
    left.look_again()
    again = left.ended and (left.goes_on or (job.start or 0.0) > left.ended)
    if not left.number or job.number != left.job or again:  # an allocation by salloc outlives an attempt
        return "starting", job
    # With a result, the run has ended, and Slurm is cleaning up.
    return ("ended", None) if left.ended else ("running", job)


def _is_new(left: Left, queue: Queue, cluster: str) -> bool:
    """Whether the attempt started after Slurm was asked, and still runs."""
    if not left.number or not queue.is_older(left.began or 0.0, cluster):
        return False
    left.look_again()
    return left.ended is None


def _named(left: Left) -> dict[int | str, float]:
    """The jobs that may run it, and when each was recorded. Slurm itself may requeue an ended job, as after a
    preemption."""
    named: dict[int | str, float] = {left.job: left.ended or left.began or 0.0} if left.job else {}
    return named | ({left.queued.id: left.queued.time} if left.queued else {})


def _folders(left: Left) -> set[str]:
    """The paths under which a job may know the run folder."""
    told = left.plan.get("run_folder")
    return {str(left.run), *([told] if isinstance(told, str) and told else [])}


def _untold(left: Left, queue: Queue, cluster: str) -> str:
    """Why the run may be active although Slurm here does not list its job."""
    if left.owner != os.geteuid():  # squeue was asked for this user's jobs only
        return f"the job belongs to user {left.owner}"
    if left.queued and queue.is_older(left.queued.time, cluster, margin_s=JUST_S):
        return f"job {left.queued.id} was submitted a moment ago, so squeue does not list it yet"
    if _is_new(left, queue, cluster):
        return "the attempt began a moment ago, after squeue was asked"
    name = cluster_of(left.folder) if left.number and not cluster else ""
    if name and name != queue.cluster:  # another cluster with the same disk
        return f"the job is on cluster {name}, but Slurm here is {queue.cluster or 'without a name'}"
    return ""


def _here(left: Left) -> State:
    """The state of a run without Slurm."""
    if not left.number:
        return State("ended", left.run)
    state = State("unknown", left.run, left.paths)
    if left.ended is not None:
        return state._replace(kind="ended")
    process = _process(left.paths)
    if process is None:
        return state._replace(why="no file names the process that runs it")
    if not processes.here(process):
        return state._replace(why="it was started on another machine, or before this machine last booted")
    if not processes.gone(process):
        return state._replace(kind="running", process=process[2])
    held = scratch.held(left.plan.get("scratch"))
    return (
        state._replace(why="the process that started it ended, but its runner is alive")
        if held
        else state._replace(kind="ended")
    )


def _process(paths: RunPaths) -> list[Any] | None:
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(files.read(paths.process)):
            case [str(), str(), int(), str()] as found if found[2] > 1:
                return list(found)
    return None
