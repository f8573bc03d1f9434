"""Whether a run waits, goes on or has ended: by its folder, by Slurm, and by the process that runs it here."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from dray.contract import files, processes, run_folder
from dray.contract.findings import ConfigError, DrayError
from dray.runs.named import cluster_of, id_of, is_run, job_of
from dray.runs.paths import RunPaths, attempts, last_attempt
from dray.runs.queued import Queued
from dray.runs.result import Result, read
from dray.runs.squeue import JUST_S, Job, Queue

Kind = Literal["queued", "starting", "running", "ended", "unknown"]
_MOST = 1 << 20  # bytes of a file of a run


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


def own(folder: Path) -> Path:
    """The run whose folder, or whose attempt's, this is. Another user's is refused: it may name any job or program."""
    run = folder if is_run(folder) else last_attempt(folder).run
    for path in (run, *([last_attempt(run).folder] if attempts(run) else [])):
        found = path.lstat()
        if found.st_uid != os.geteuid() or not files.is_own(path):
            raise ConfigError(
                "the run is another user's, or others may write into it",
                where=path,
                wanted=f"a folder of user {os.geteuid()}",
                found=f"of user {found.st_uid}, mode {found.st_mode & 0o7777:04o}",
            )
    return run


def result(paths: RunPaths) -> Result | None:
    """How the attempt has ended; None while it goes on, or where nobody has written it down."""
    with suppress(OSError, ValueError):
        return read(paths.result)
    return None


def look(run: Path, queue: Queue | None = None) -> State:
    """As it is now; for many runs with one queue, which is asked once."""
    queue = queue or Queue()
    numbers = attempts(run)
    paths = RunPaths(run, numbers[-1]) if numbers else None
    queued = _queued(run)
    cluster = queued.cluster if queued else ""
    if queued and queued.id in {id_of(RunPaths(run, number)) for number in numbers}:
        queued = None  # it has begun
    job = job_of(paths) if paths else 0
    if not job and not queued:
        return _here(run, paths)
    ended = paths is not None and paths.result.exists()
    over = ended and not queued and not _goes_on(paths)
    try:
        known = queue.jobs(cluster)
    except DrayError as silent:
        return State("ended" if over else "unknown", run, paths, cluster=cluster, why=silent.finding.problem)
    named = _named(paths, queued, job, ended=ended)
    found = next((one for one in known if _is(one, run, named, queue)), None)
    if found is None:
        why = "" if over else _of_another(run, paths) or ("" if cluster else _elsewhere(paths, queue))
        if queued and queue.is_older(queued.time, cluster, margin_s=JUST_S):
            why = f"job {queued.id} was submitted a moment ago, and squeue does not list it yet"
        return State("unknown" if why else "ended", run, paths, cluster=cluster, why=why)
    if found.waits:
        return State("queued", run, paths, found, cluster)
    again = paths and ended and (_goes_on(paths) or (found.start or 0.0) > _time(paths.result))
    begun = paths is not None and found.number == job and not again  # an allocation by salloc outlives an attempt
    if begun and ended:  # its last words are written, and Slurm is cleaning up
        return State("ended", run, paths, cluster=cluster)
    return State("running" if begun else "starting", run, paths, found, cluster)


def _of_another(run: Path, paths: RunPaths | None) -> str:
    """Why Slurm does not tell of its job here: squeue was asked for this user's alone, and may list no other's."""
    with suppress(OSError):
        owner = (paths.folder if paths else run / run_folder.JOB).lstat().st_uid
        return f"its job is one of user {owner}'s" if owner != os.geteuid() else ""
    return ""


def _elsewhere(paths: RunPaths | None, queue: Queue) -> str:
    """Why Slurm here does not know of its job: another cluster has the same disk."""
    name = cluster_of(paths) if paths else ""
    if not name or name == queue.cluster:
        return ""
    return f"its job is one of the cluster {name}'s, and Slurm here is {queue.cluster or 'of no name'}"


def _named(paths: RunPaths | None, queued: Queued | None, job: int, *, ended: bool) -> dict[int | str, float]:
    """The jobs by which the run may go on, and when each was written down."""
    named: dict[int | str, float] = {}
    if paths and job and not ended:
        named[job] = _time(paths.plan)
    elif paths and job:  # Slurm itself may have put it back, as after a preemption
        named[job] = _time(paths.result)
    if queued:
        named[queued.id] = queued.time
    return named


def _is(job: Job, run: Path, named: dict[int | str, float], queue: Queue) -> bool:
    """By its number, unless another job has got that since; or by its own command line, as of a follow-on job."""
    if f" --run={run} " in f" {job.command} ":
        return True
    since = named.get(job.id, named.get(job.number))
    return since is not None and queue.was_there(job, since)


def _goes_on(paths: RunPaths | None) -> bool:
    """With the same job, which goes back into the queue or on with other nodes."""
    found = result(paths) if paths else None
    return bool(found and found.next and (found.next.requeue or found.next.spare))


def _here(run: Path, paths: RunPaths | None) -> State:
    if paths is None or paths.result.exists():
        return State("ended", run, paths)
    process = _process(paths)
    if process is None:
        return State("unknown", run, paths, why="no file tells which process runs it")
    if not processes.here(process):
        return State("unknown", run, paths, why="it was started on another machine, or before this one's last start")
    if processes.gone(process):
        return State("ended", run, paths)
    return State("running", run, paths, process=process[2])


def _process(paths: RunPaths) -> list[Any] | None:
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(files.read(paths.process, limit=_MOST)):
            case [str(), str(), int(), str()] as found if found[2] > 1:
                return list(found)
    return None


def _queued(run: Path) -> Queued | None:
    with suppress(OSError, ValidationError, ValueError):
        return Queued.model_validate_json(files.read(run / run_folder.JOB, limit=_MOST))
    return None


def _time(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0
