"""Why a job was stopped, as far as Slurm tells."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

# What scontrol shows as the state of a job or its reason; while a job is ending its state is COMPLETING.
TIME_LIMIT, PREEMPTION, REQUEUE = "the time limit", "preemption", "scontrol requeue"
_BY_STATE = {
    "TIMEOUT": TIME_LIMIT,
    "PREEMPTED": PREEMPTION,
    "NODE_FAIL": "a node failure",
    "DEADLINE": "its deadline",
    "CANCELLED": "scancel",
    "OUT_OF_MEMORY": "the memory limit",
}
_BY_REASON = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "DeadLine": "DEADLINE", "Preempted": "PREEMPTED"}
_EARLY_S = 120  # Slurm may send a signal a minute early, and its time limit has minutes
_NEVER = ("", "None", "N/A", "Unknown")


class Stop(NamedTuple):
    """What stopped a run, and when."""

    reason: str
    at: str
    left_s: int | None = None
    """Seconds from SIGUSR1 to the time limit."""

    @property
    def by_slurm(self) -> bool:
        """Whether Slurm itself has told so."""
        return self.reason in (REQUEUE, *_BY_STATE.values())


def parse(text: str, *, now: float, grace: int) -> Stop:
    """From `signal=NAME at=SECONDS end=SECONDS restarts=COUNT` and, if the controller answered, `scontrol show job`.

    SIGUSR1 about `grace` seconds before the end is the time limit's.
    """
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    at = _seconds(fields, "at") or now
    reason, end = _reason(fields, at, grace), _seconds(fields, "end")
    told = fields.get("signal") == "USR1" and reason == TIME_LIMIT and end is not None and end >= at
    return Stop(reason, utc(at), int(end - at) if told and end is not None else None)


def of_state(state: str) -> str:
    """What stopped a job in this state of sacct's, such as `CANCELLED by 1000`; empty where it stopped by itself."""
    return _BY_STATE.get(state.split(" ", maxsplit=1)[0], "")


def of_a_batch_job(text: str) -> bool:
    """Whether Slurm can put the job back into its queue, unlike one by salloc."""
    return re.search(r"(?m)(?:^|\s)BatchFlag=1(?:\s|$)", text) is not None


def _seconds(fields: dict[str, str], name: str) -> int | None:
    """A time since 1970, and none of another form."""
    value = fields.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,11}", value) else None


def _reason(fields: dict[str, str], at: float, grace: int) -> str:
    state = fields.get("JobState", "")
    if fields.get("PreemptTime", "") not in _NEVER:
        state = "PREEMPTED"
    state = _BY_REASON.get(fields.get("Reason", ""), state)
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
    # A job that nothing else ends was cancelled; one that runs on got a signal alone.
    return _BY_STATE["CANCELLED"] if state == "COMPLETING" else f"SIG{fields.get('signal') or 'TERM'}"


def utc(seconds: float | None = None) -> str:
    """A time as result.json has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
