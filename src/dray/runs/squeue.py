"""This user's jobs in Slurm's queue."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from dray import process
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError, UnfitError
from dray.fitness import slurm_commands
from dray.runs.stop import of_a_batch_job

# squeue does not list ended jobs.
_WAITING = frozenset(
    {"PENDING", "EXPEDITING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
_COLUMNS = ("%A", "%i", "%T", "%V", "%r", "%S", "%o")  # the last column may contain any character
_ANSWER_S = 30.0
JUST_S = 10.0  # until squeue lists a job after sbatch's answer
_LATE_S = 120.0  # clocks differ, and a job may be queued before its number is recorded


class Job(NamedTuple):
    """A job that waits, runs or is ending."""

    number: int
    id: str
    """The id for scancel, such as 12_3. `number` is ambiguous for arrays: tasks that have not started share it, and so
    does the last task to start."""
    state: str
    submitted: float
    reason: str
    """Why it waits."""
    start: float | None
    """When it started; while it waits, the start that Slurm expects, or the earliest possible."""
    command: str
    """The script and its arguments, separated by spaces."""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes."""
        return self.state in _WAITING


def jobs(cluster: str = "") -> list[Job]:
    """All jobs of this user. DrayError if Slurm is missing or does not answer."""
    of = [f"--clusters={cluster}"] if cluster else []
    # Variables such as SQUEUE_PARTITION would hide jobs.
    hidden = [f"--unset={name}" for name in os.environ if name.startswith("SQUEUE_")]
    format_ = f"--format={'|'.join(_COLUMNS)}"
    prefix = ["env", *hidden] if hidden else []
    argv = [*prefix, "squeue", "--array", "--noheader", f"--user={os.geteuid()}", *of, format_]
    done = process.run(argv, env={"SLURM_TIME_FORMAT": "standard"}, check=False, seconds=_ANSWER_S)
    if done.code:
        raise UnfitError("squeue failed, so dray cannot see your jobs", where="squeue", found=done.err.strip()[-300:])
    return [job for job in map(_job, done.out.splitlines()) if job]


class Queue:
    """The jobs, for many runs: each cluster is asked once, even if it does not answer."""

    def __init__(self) -> None:
        self._known: dict[str, list[Job] | DrayError] = {}
        self._restarts: dict[str, bool] = {}
        self._asked: dict[str, float] = {}
        self._by_name: dict[str, dict[int | str, list[Job]]] = {}
        self._by_folder: dict[str, dict[str, list[Job]]] = {}

    def jobs(self, cluster: str = "") -> list[Job]:
        """All jobs of this user on the cluster. DrayError if Slurm is missing or does not answer."""
        if cluster not in self._known:
            self._asked[cluster] = time.time()
            try:
                self._known[cluster] = jobs(cluster)
            except DrayError as silent:
                self._known[cluster] = silent
        found = self._known[cluster]
        if isinstance(found, DrayError):
            raise found
        return found

    @property
    def answers(self) -> bool:
        """Whether this machine's Slurm answers."""
        with suppress(DrayError):
            self.jobs()
            return True
        return False

    @cached_property
    def is_absent(self) -> bool:
        """Whether this machine has no Slurm at all."""
        return not self.answers and not process.which("squeue")

    def is_older(self, at: float, cluster: str = "", *, margin_s: float = 0.0) -> bool:
        """Whether Slurm was asked before this time and so cannot know of it; a future time is another clock's error."""
        return self._asked.get(cluster, at + margin_s) - margin_s < at < time.time() + JUST_S

    @cached_property
    def cluster(self) -> str:
        """The name of this machine's cluster."""
        return slurm_commands.cluster_name() if self.answers else ""

    def of(self, named: Mapping[int | str, float], folders: Iterable[str], cluster: str = "") -> Job | None:
        """A job with one of these numbers or array tasks that existed at that time, or with such a run folder
        (`--run=`). A running job comes before a waiting one. DrayError as from `jobs`."""
        known = self.jobs(cluster)
        if cluster not in self._by_name:
            self._sort(known, cluster)
        by_name, by_folder = self._by_name[cluster], self._by_folder[cluster]
        found = [one for name, at in named.items() for one in by_name.get(name, ()) if self.was_there(one, at)]
        for folder in folders:  # its name may contain spaces
            jobs = by_folder.get(folder.partition(" ")[0], ())
            found += [one for one in jobs if f" --run={folder} " in f" {one.command} "]
        return min(found, key=lambda one: one.waits, default=None)

    def _sort(self, known: list[Job], cluster: str) -> None:
        """Index the jobs by number and folder, because there may be thousands."""
        by_name, by_folder = self._by_name.setdefault(cluster, {}), self._by_folder.setdefault(cluster, {})
        for one in known:
            for name in (one.number, one.id):
                by_name.setdefault(name, []).append(one)
            for folder in {word[6:] for word in one.command.split(" ") if word.startswith("--run=")}:
                by_folder.setdefault(folder, []).append(one)

    def was_there(self, job: Job, at: float) -> bool:
        """Whether the job existed at this time; else Slurm reused its number."""
        return job.submitted <= at + _LATE_S or self._requeued(job.id)

    def _requeued(self, id_: str) -> bool:
        """Whether the job was requeued, which changes its submission time."""
        if id_ not in self._restarts:
            with suppress(DrayError):
                argv = ["scontrol", "show", "job", "--oneliner", id_]
                shown = process.run(argv, check=False, seconds=_ANSWER_S).out
                self._restarts[id_] = re.search(r"\bRestarts=[1-9]", shown) is not None
        return self._restarts.get(id_, False)


def cancel(job: Job, cluster: str = "", *, waiting: bool = False) -> None:
    """Cancel the job; with `waiting`, only if it has not started."""
    of = [f"--clusters={cluster}"] if cluster else []
    done = process.run(
        ["scancel", *of, *(["--state=PENDING"] if waiting else []), job.id], check=False, seconds=_ANSWER_S
    )
    if done.code and not waiting:  # with a state, scancel also fails if no job matched
        raise DrayError("scancel failed", where=f"job {job.id}", found=(done.err or done.out).strip()[-300:])


def of_batch(job: Job) -> bool:
    """Whether it is a batch job, not an salloc allocation, which the user may use for other work too."""
    argv = ["scontrol", "show", "job", "--oneliner", job.id]
    return of_a_batch_job(process.run(argv, check=False, seconds=_ANSWER_S).out)


def _job(line: str) -> Job | None:
    fields = line.split("|", len(_COLUMNS) - 1)
    if len(fields) < len(_COLUMNS) or not fields[0].isdecimal():
        return None
    number, id_, state, submitted, reason, start, command = fields
    return Job(
        int(number), id_, state, _seconds(submitted), str(printable(reason)), _seconds(start) or None,
        str(printable(command.strip())),
    )  # fmt: skip


def _seconds(stamp: str) -> float:
    with suppress(ValueError):
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    return 0.0
