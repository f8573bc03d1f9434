"""Whether a run waits, goes on or has ended: by its folder, by Slurm, and by the process that runs it here.

This is decided here alone; runs/look.py shows what was decided.
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
from dray.runs import brief, metrics
from dray.runs.named import cluster_of, id_of, is_run, job_of
from dray.runs.paths import RunPaths, attempts, last_attempt
from dray.runs.queued import Queued
from dray.runs.reading import LIMIT, Table, dig, require_version, table, written
from dray.runs.squeue import JUST_S, Job, Queue

Kind = Literal["queued", "starting", "running", "ended", "unknown"]


class State(NamedTuple):
    """A run as it is now."""

    kind: Kind
    run: Path
    paths: RunPaths | None = None
    """Its last attempt, if it has one."""
    job: Job | None = None
    cluster: str = ""
    """Of several that one Slurm knows; empty for this machine's."""
    process: int = 0
    """What runs it on this machine."""
    why: str = ""
    """Why nobody here knows."""

    @property
    def where(self) -> str:
        """Who has it, in words."""
        if self.job:
            return f"job {self.job.id}, {self.job.state}"
        return f"process {self.process}" if self.process else self.why


class Left:
    """What an attempt has left, or a run that has none yet: each file is read once, and only if somebody asks for it,
    since there are lists of thousands of runs."""

    def __init__(self, run: Path, number: int, numbers: list[int]) -> None:
        self.run, self.number, self.numbers = run, number, numbers
        self.folder = f"{run}/{run_folder.attempt(number)}"  # text: a Path each would be half the time of a list
        self.warnings: list[str] = []
        self.ended: float | None = None
        """When its result was written, whatever is in that."""
        self.result: Table | None = None
        self.look_again()

    def look_again(self) -> None:
        """Read the result, if it has come."""
        if self.ended is None and self.number:
            file = f"{self.folder}/{run_folder.RESULT}"
            self.ended = written(file)
            self.result = None if self.ended is None else table(file, self.warnings, require_version)

    @cached_property
    def plan(self) -> Table:
        """What a list needs of it; empty where there is none."""
        return (brief.plan(f"{self.folder}/{run_folder.PLAN}", self.warnings) if self.number else None) or {}

    @cached_property
    def paths(self) -> RunPaths:
        """All of its files, of which an attempt that has ended needs two."""
        return RunPaths(self.run, self.number)

    @cached_property
    def began(self) -> float | None:
        """When its plan was written."""
        return written(f"{self.folder}/{run_folder.PLAN}")

    @property
    def goes_on(self) -> bool:
        """With the same job, which goes back into the queue or on with other nodes."""
        return bool(dig(self.result, "next", "requeue") or dig(self.result, "next", "spare"))

    @cached_property
    def job(self) -> int:
        """The number of the job that the attempt is in; 0 without Slurm, or where nothing tells."""
        return (metrics.whole(self.plan, "job") or job_of(self.folder)) if self.number else 0

    @cached_property
    def submitted(self) -> Queued | None:
        """The job that was put into the queue for the run."""
        file = f"{self.run}/{run_folder.JOB}"
        if written(file) is not None:
            with suppress(OSError, ValueError):
                return Queued.model_validate_json(files.read(file, limit=LIMIT))
        return None

    @cached_property
    def queued(self) -> Queued | None:
        """The same, unless it has begun an attempt."""
        one = self.submitted
        if one is None or (one.task is None and one.job == self.job):
            return None
        begun = (id_of(f"{self.run}/{run_folder.attempt(number)}") for number in self.numbers)
        return None if one.id in begun else one

    @property
    def cancelled(self) -> bool:
        """Whether `dray stop` took it out of the queue before it began."""
        return not self.number and self.submitted is not None and self.submitted.stopped is not None

    @cached_property
    def owner(self) -> int:
        """The user whose run it is."""
        with suppress(OSError):
            return os.lstat(self.folder if self.number else self.run).st_uid
        return os.geteuid()


def own(folder: Path) -> Path:
    """The run whose folder, or whose attempt's, this is. Another user's is refused: it may name any job or program."""
    run = folder if is_run(folder) else last_attempt(folder).run
    for path in (run, *([last_attempt(run).folder] if attempts(run) else [])):
        try:
            found, is_own = path.lstat(), files.is_own(path)
        except OSError as refused:  # as of a link that leads nowhere
            raise ConfigError("the run cannot be read", where=path, found=refused.strerror) from refused
        if found.st_uid != os.geteuid() or not is_own:
            raise ConfigError(
                "the run is another user's, or others may write into it",
                where=path,
                wanted=f"a folder of user {os.geteuid()}",
                found=f"of user {found.st_uid}, mode {found.st_mode & 0o7777:04o}",
            )
    return run


def look(run: Path, queue: Queue | None = None) -> State:
    """As it is now; for many runs with one queue, which is asked once."""
    numbers = attempts(run)
    return decide(Left(run, max(numbers, default=0), numbers), queue or Queue())


def decide(left: Left, queue: Queue) -> State:
    """By its last attempt, and by the job that was submitted for the next one."""
    here = None if left.job or left.queued else _here(left)
    if here and here.kind != "ended":
        return here
    # Another user's file is not followed to other clusters: Slurm lists none of their jobs here.
    cluster = left.submitted.cluster if left.submitted else ""
    cluster = cluster if cluster and left.owner == os.geteuid() else ""
    paths = left.paths if left.number else None
    why, over = "", here or left.cancelled or (left.ended is not None and not left.queued and not left.goes_on)
    try:
        if found := queue.of(_named(left), _folders(left), cluster):
            kind, job = _found(left, found, queue, cluster)
            return State(kind, left.run, paths, job, cluster)
        why = "" if over else _untold(left, queue, cluster)
    except DrayError as silent:
        why = "" if over else silent.finding.problem
    left.look_again()
    return State("unknown" if why else "ended", left.run, paths, cluster=cluster, why=why)


def _found(left: Left, job: Job, queue: Queue, cluster: str) -> tuple[Kind, Job | None]:
    """By the job that has the run."""
    if job.waits and not _is_new(left, queue, cluster):
        return "queued", job
    left.look_again()
    again = left.ended and (left.goes_on or (job.start or 0.0) > left.ended)
    if not left.number or job.number != left.job or again:  # an allocation by salloc outlives an attempt
        return "starting", job
    # With a result, its last words are written, and Slurm is cleaning up.
    return ("ended", None) if left.ended else ("running", job)


def _is_new(left: Left, queue: Queue, cluster: str) -> bool:
    """Whether the attempt has begun since Slurm was asked, and goes on."""
    if not left.number or not queue.is_older(left.began or 0.0, cluster):
        return False
    left.look_again()
    return left.ended is None


def _named(left: Left) -> dict[int | str, float]:
    """The jobs by which the run may go on, and when each was written down. Slurm itself may put back one that has
    ended, as after a preemption."""
    named: dict[int | str, float] = {left.job: left.ended or left.began or 0.0} if left.job else {}
    return named | ({left.queued.id: left.queued.time} if left.queued else {})


def _folders(left: Left) -> set[str]:
    """The run's folder, by the names that a job may have been given."""
    told = left.plan.get("run_folder")
    return {str(left.run), *([told] if isinstance(told, str) and told else [])}


def _untold(left: Left, queue: Queue, cluster: str) -> str:
    """Why it is no end that Slurm here does not tell of its job."""
    if left.owner != os.geteuid():  # squeue was asked for this user's alone, and may list no other's
        return f"its job is one of user {left.owner}'s"
    if left.queued and queue.is_older(left.queued.time, cluster, margin_s=JUST_S):
        return f"job {left.queued.id} was submitted a moment ago, and squeue does not list it yet"
    if _is_new(left, queue, cluster):
        return "its attempt began a moment ago, and squeue was asked before"
    name = cluster_of(left.folder) if left.number and not cluster else ""
    if name and name != queue.cluster:  # which has the same disk
        return f"its job is one of the cluster {name}'s, and Slurm here is {queue.cluster or 'of no name'}"
    return ""


def _here(left: Left) -> State:
    """Of a run without Slurm."""
    if not left.number:
        return State("ended", left.run)
    state = State("unknown", left.run, left.paths)
    if left.ended is not None:
        return state._replace(kind="ended")
    process = _process(left.paths)
    if process is None:
        return state._replace(why="no file tells which process runs it")
    if not processes.here(process):
        return state._replace(why="it was started on another machine, or before this one's last start")
    if not processes.gone(process):
        return state._replace(kind="running", process=process[2])
    held = scratch.held(left.plan.get("scratch"))
    return state._replace(why="its runner goes on without it") if held else state._replace(kind="ended")


def _process(paths: RunPaths) -> list[Any] | None:
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(files.read(paths.process, limit=LIMIT)):
            case [str(), str(), int(), str()] as found if found[2] > 1:
                return list(found)
    return None
