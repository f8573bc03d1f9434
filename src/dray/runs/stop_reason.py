"""Why a job was stopped, from Slurm, or from the files of a run that was killed before it wrote a result."""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, run_folder
from dray.runs import slurm

TIME_LIMIT, PREEMPTION, REQUEUE, TERM = "the time limit", "preemption", "scontrol requeue", "SIGTERM"
_BY_STATE = {
    "TIMEOUT": TIME_LIMIT,
    "PREEMPTED": PREEMPTION,
    "NODE_FAIL": "a node failure",
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
LOGS = (f"{run_folder.LOGS}/srun.log", run_folder.node_log(0))
"""An attempt's logs with such messages; the jobs' own logs are in the run folder."""
_DUE_TO = {
    None: "scancel",
    "TIME LIMIT": TIME_LIMIT,
    "PREEMPTION": PREEMPTION,
    "NODE FAILURE": "a node failure",
    "JOB REQUEUE": REQUEUE,
}


class Stop(NamedTuple):
    """What stopped a run, and when."""

    reason: str
    at: str

    @property
    def by_wish(self) -> bool:
        """Whether somebody, or a known limit, asked for the end."""
        return self.reason not in ("a node failure", "the memory limit")

    @property
    def by_slurm(self) -> bool:
        """Whether Slurm itself gave this reason."""
        return self.reason in (REQUEUE, *_BY_STATE.values())


def parse(text: str, *, now: float, grace: int) -> Stop:
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


def of_state(state: str) -> str:
    """What stopped a job with this sacct state, such as `CANCELLED by 1000`; empty if it ended by itself."""
    return _BY_STATE.get(state.partition(" ")[0], "")


def asked(attempt: Path) -> list[str]:
    """Who asked an attempt to end: `dray stop`, or the signals that its batch script received."""
    with suppress(OSError):
        return files.read(attempt / run_folder.STOP).decode(errors="replace").splitlines()
    return []


def of_files(attempt: Path, job: int, began: float) -> Stop | None:
    """What ended an attempt without a result, from Slurm's messages in its logs.

    Slurm shows `dray stop` as scancel. Messages from before the attempt `began` belong to earlier attempts. An array
    names its tasks' logs, and a job that follows another writes into that one's log.
    """
    logs = (*sorted(attempt.parent.glob("job-*.log")), *(attempt / name for name in LOGS))
    for line in (line for log in logs for line in files.tail(log)):
        found = _CANCELLED.search(line[:1000])
        if not found or found[3] not in _DUE_TO or job not in (0, int(found[1])):
            continue
        with suppress(ValueError, OverflowError):
            at = time.mktime(time.strptime(found[2], "%Y-%m-%dT%H:%M:%S"))
            if at >= began - _CLOCKS_S:
                by_user = run_folder.BY_USER in asked(attempt)
                return Stop(run_folder.BY_USER if by_user else _DUE_TO[found[3]], utc(at))
    return None


def utc(seconds: float | None = None) -> str:
    """The time in UTC, as in result.json."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
