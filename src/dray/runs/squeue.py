"""This user's jobs, as Slurm has them now."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from dray import process
from dray.contract.findings import DrayError, UnfitError
from dray.contract.values import printable

# Jobs that have ended are not among them.
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_COLUMNS = "%A|%i|%T|%V|%o"
_ANSWER_S = 30.0


class Job(NamedTuple):
    """A job that waits, runs or is ending."""

    number: int
    id: str
    """As scancel takes it: of an array's last task the number alone would be the whole array."""
    state: str
    submitted: float
    command: str
    """The script and its arguments, with a blank between."""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet, or none any more."""
        return self.state in _WAITING


def jobs(cluster: str = "") -> list[Job]:
    """All of this user's. DrayError: Slurm is not here, or does not answer."""
    of = [f"--clusters={cluster}"] if cluster else []
    argv = ["squeue", "--noheader", f"--user={os.geteuid()}", *of, f"--format={_COLUMNS}"]
    done = process.run(argv, env={"SLURM_TIME_FORMAT": "standard"}, check=False, seconds=_ANSWER_S)
    if done.code:
        raise UnfitError("Slurm does not tell which jobs there are", where="squeue", found=done.err.strip()[-300:])
    lines = [line.split("|", 4) for line in done.out.splitlines()]
    return [
        Job(int(number), id_, state, _seconds(submitted), str(printable(command)))
        for number, id_, state, submitted, command in (line for line in lines if len(line) == 5)
        if number.isdecimal()
    ]


def asked_once() -> Callable[[str], list[Job]]:
    """The same for many runs: each cluster is asked once, also where it does not answer."""
    known: dict[str, list[Job] | DrayError] = {}

    def asked(cluster: str) -> list[Job]:
        if cluster not in known:
            try:
                known[cluster] = jobs(cluster)
            except DrayError as silent:
                known[cluster] = silent
        found = known[cluster]
        if isinstance(found, DrayError):
            raise found
        return found

    return asked


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

    argv = ["scontrol", "show", "job", "--oneliner", str(job.number)]
    return of_a_batch_job(process.run(argv, check=False, seconds=_ANSWER_S).out)


def _seconds(stamp: str) -> float:
    with suppress(ValueError):
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    return 0.0
