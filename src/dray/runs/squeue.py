"""This user's jobs, as Slurm has them now."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from dray import process
from dray.contract.findings import DrayError, UnfitError
from dray.contract.values import printable
from dray.fitness import scheduler

# Jobs that have ended are not among them.
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_COLUMNS = ("%A", "%i", "%T", "%V", "%r", "%S", "%o")  # the last may have any character
_ANSWER_S = 30.0
JUST_S = 10.0  # from sbatch's answer to the job in squeue
_LATE_S = 120.0  # clocks differ, and a job may be in the queue a moment before its number is written down


class Job(NamedTuple):
    """A job that waits, runs or is ending."""

    number: int
    id: str
    """As scancel takes it, such as 12_3: the array's own number is also that of each task that has never begun, and of
    the last one that does."""
    state: str
    submitted: float
    reason: str
    """Why it waits."""
    start: float | None
    """When it started; while it waits, when Slurm expects to start it, or may at the earliest."""
    command: str
    """The script and its arguments, with a blank between."""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet, or none any more."""
        return self.state in _WAITING


def jobs(cluster: str = "") -> list[Job]:
    """All of this user's. DrayError: Slurm is not here, or does not answer."""
    of = [f"--clusters={cluster}"] if cluster else []
    # The user's own SQUEUE_PARTITION and its like would hide jobs.
    hidden = [f"--unset={name}" for name in os.environ if name.startswith("SQUEUE_")]
    format_ = f"--format={'|'.join(_COLUMNS)}"
    prefix = ["env", *hidden] if hidden else []
    argv = [*prefix, "squeue", "--array", "--noheader", f"--user={os.geteuid()}", *of, format_]
    done = process.run(argv, env={"SLURM_TIME_FORMAT": "standard"}, check=False, seconds=_ANSWER_S)
    if done.code:
        raise UnfitError("Slurm does not tell which jobs there are", where="squeue", found=done.err.strip()[-300:])
    return [job for job in map(_job, done.out.splitlines()) if job]


class Queue:
    """The same for many runs: each cluster is asked once, also where it does not answer."""

    def __init__(self) -> None:
        self._known: dict[str, list[Job] | DrayError] = {}
        self._restarts: dict[str, bool] = {}
        self._asked: dict[str, float] = {}
        self._by_name: dict[str, dict[int | str, list[Job]]] = {}
        self._by_folder: dict[str, dict[str, list[Job]]] = {}

    def jobs(self, cluster: str = "") -> list[Job]:
        """All of this user's there. DrayError: Slurm is not here, or does not answer."""
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
        """Whether this machine's Slurm does."""
        with suppress(DrayError):
            self.jobs()
            return True
        return False

    @cached_property
    def is_absent(self) -> bool:
        """Whether this machine has no Slurm at all, rather than one that is silent."""
        return not self.answers and not process.which("squeue")

    def is_older(self, at: float, cluster: str = "", *, margin_s: float = 0.0) -> bool:
        """Whether it was asked before that time, and so cannot tell of it; a time to come is another clock's."""
        return self._asked.get(cluster, at + margin_s) - margin_s < at < time.time() + JUST_S

    @cached_property
    def cluster(self) -> str:
        """What Slurm calls the cluster that was asked."""
        return scheduler.cluster_name() if self.answers else ""

    def of(self, named: Mapping[int | str, float], folders: Iterable[str], cluster: str = "") -> Job | None:
        """One of the jobs that are named by number, or as tasks of an array, and was there at that time; or one for
        such a run folder (`--run=`). One that runs comes before one that waits. DrayError as from `jobs`."""
        known = self.jobs(cluster)
        if cluster not in self._by_name:
            self._sort(known, cluster)
        by_name, by_folder = self._by_name[cluster], self._by_folder[cluster]
        found = [one for name, at in named.items() for one in by_name.get(name, ()) if self.was_there(one, at)]
        for folder in folders:  # one may have blanks in its name
            jobs = by_folder.get(folder.partition(" ")[0], ())
            found += [one for one in jobs if f" --run={folder} " in f" {one.command} "]
        return min(found, key=lambda one: one.waits, default=None)

    def _sort(self, known: list[Job], cluster: str) -> None:
        """There may be thousands of jobs, and of runs."""
        by_name, by_folder = self._by_name.setdefault(cluster, {}), self._by_folder.setdefault(cluster, {})
        for one in known:
            for name in (one.number, one.id):
                by_name.setdefault(name, []).append(one)
            for folder in {word[6:] for word in one.command.split(" ") if word.startswith("--run=")}:
                by_folder.setdefault(folder, []).append(one)

    def was_there(self, job: Job, at: float) -> bool:
        """Whether it is the job that had its number then; else Slurm has given that number again."""
        return job.submitted <= at + _LATE_S or self._requeued(job.id)

    def _requeued(self, id_: str) -> bool:
        """Whether its time of submission is that of a requeue; else an old number was given again."""
        if id_ not in self._restarts:
            with suppress(DrayError):
                argv = ["scontrol", "show", "job", "--oneliner", id_]
                shown = process.run(argv, check=False, seconds=_ANSWER_S).out
                self._restarts[id_] = re.search(r"\bRestarts=[1-9]", shown) is not None
        return self._restarts.get(id_, False)


def cancel(job: Job, cluster: str = "", *, waiting: bool = False) -> None:
    """End it; with `waiting` only if it has not begun in the meantime."""
    of = [f"--clusters={cluster}"] if cluster else []
    done = process.run(
        ["scancel", *of, *(["--state=PENDING"] if waiting else []), job.id], check=False, seconds=_ANSWER_S
    )
    if done.code and not waiting:  # with a state scancel also says so where there was nothing to do
        raise DrayError("scancel failed", where=f"job {job.id}", found=(done.err or done.out).strip()[-300:])


def of_batch(job: Job) -> bool:
    """Whether it is a script's, and not an allocation by salloc, which the user has for other things too."""
    from dray.runs.stop import of_a_batch_job  # noqa: PLC0415

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
