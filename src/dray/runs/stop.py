"""Why a job was stopped, from Slurm, or from the files of a run that was killed before it wrote a result."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, run_folder

# States and reasons that scontrol shows; the state of an ending job is COMPLETING.
TIME_LIMIT, PREEMPTION, REQUEUE, TERM = "the time limit", "preemption", "scontrol requeue", "SIGTERM"
_BY_STATE = {
    "TIMEOUT": TIME_LIMIT,
    "PREEMPTED": PREEMPTION,
    "NODE_FAIL": "a node failure",
    "DEADLINE": "its deadline",
    "CANCELLED": "scancel",
    "OUT_OF_MEMORY": "the memory limit",
}
_BY_REASON = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "DeadLine": "DEADLINE", "Preempted": "PREEMPTED"}
_EARLY_S = 120  # Slurm may send a signal a minute early, and counts time limits in minutes
_NEVER = ("", "None", "N/A", "Unknown")
# srun also cancels a step after a task has failed; then the batch script continues and writes a result.
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S{1,60} ON \S{1,300} CANCELLED AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)"
    r"(?: DUE TO ([A-Z ]{1,40}\b))?"
)
_DUE_TO = {
    "": "scancel", "TIME LIMIT": TIME_LIMIT, "PREEMPTION": PREEMPTION, "NODE FAILURE": "a node failure",
    "JOB REQUEUE": REQUEUE,
}  # fmt: skip
_CLOCKS_S = 10.0  # between the clocks of a node and of the disk


class Stop(NamedTuple):
    """What stopped a run, and when."""

    reason: str
    at: str
    left_s: int | None = None
    """Seconds from SIGUSR1 to the time limit."""

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
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    at = _seconds(fields, "at") or now
    reason, end = _reason(fields, at, grace), _seconds(fields, "end")
    told = fields.get("signal") == "USR1" and reason == TIME_LIMIT and end is not None and end >= at
    return Stop(reason, utc(at), int(end - at) if told and end is not None else None)


def of_state(state: str) -> str:
    """What stopped a job with this sacct state, such as `CANCELLED by 1000`; empty if it ended by itself."""
    return _BY_STATE.get(state.split(" ", maxsplit=1)[0], "")


def of_job(text: str) -> str:
    """What stopped a job, from `scontrol show job`, which knows an ended job for some minutes."""
    return _BY_STATE.get(_state(dict(re.findall(r"(\w+)=(\S*)", text))), "")


def asked(attempt: Path) -> list[str]:
    """Who asked an attempt to end: `dray stop`, or the signals that its batch script received."""
    with suppress(OSError):
        file = attempt / run_folder.STOP
        # Most stop files are empty, and lists have thousands of runs.
        return files.read(file).decode(errors="replace").splitlines() if file.stat().st_size else []
    return []


def of_files(attempt: Path, job: int, began: float) -> Stop | None:
    """What ended an attempt without a result, from Slurm's messages in its logs.

    Slurm shows `dray stop` as scancel. Messages from before the attempt `began` belong to earlier attempts.
    """
    logs = (attempt.parent / f"job-{job}.log", attempt / run_folder.LOGS / "srun.log", attempt / run_folder.node_log(0))
    for line in (line for log in logs if log.is_file() for line in files.tail(log)):
        if (found := _CANCELLED.search(line[:1000])) and (reason := _DUE_TO.get(found[2] or "")):
            with suppress(ValueError, OverflowError):
                at = time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))
                if at >= began - _CLOCKS_S:
                    return Stop(run_folder.BY_USER if run_folder.BY_USER in asked(attempt) else reason, utc(at))
    return None


def of_a_batch_job(text: str) -> bool:
    """Whether Slurm can requeue the job: a batch job, not an salloc allocation."""
    return re.search(r"(?m)(?:^|\s)BatchFlag=1(?:\s|$)", text) is not None


def _seconds(fields: dict[str, str], name: str) -> int | None:
    """The field as seconds since 1970; None if it has another form."""
    value = fields.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,11}", value) else None


def _state(fields: dict[str, str]) -> str:
    """The job's state, from its state and reason."""
    state = "PREEMPTED" if fields.get("PreemptTime", "") not in _NEVER else fields.get("JobState", "")
    return _BY_REASON.get(fields.get("Reason", ""), state)


def _reason(fields: dict[str, str], at: float, grace: int) -> str:
    state = _state(fields)
    if state in _BY_STATE:
        return _BY_STATE[state]
    end = _seconds(fields, "end")
    if end is not None and at >= end - 1:
        return _BY_STATE["TIMEOUT"]
    if end is not None and fields.get("signal") == "USR1" and end - at <= grace + _EARLY_S:
        return _BY_STATE["TIMEOUT"]
    before, now = _seconds(fields, "restarts"), _seconds(fields, "Restarts")
    if before is not None and now is not None and now > before:
        return REQUEUE
    # An ending job without another reason was cancelled; a job that still runs only got a signal.
    return _BY_STATE["CANCELLED"] if state == "COMPLETING" else f"SIG{fields.get('signal') or 'TERM'}"


def utc(seconds: float | None = None) -> str:
    """The time in UTC, as in result.json."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
