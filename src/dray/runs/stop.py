"""Why a job was stopped, as far as Slurm tells."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

# What scontrol shows as the state of a job or its reason; while a job is ending its state is COMPLETING.
_BY_STATE = {
    "TIMEOUT": "the time limit",
    "PREEMPTED": "preemption",
    "NODE_FAIL": "a node failure",
    "DEADLINE": "its deadline",
    "CANCELLED": "scancel",
}
_BY_REASON = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "DeadLine": "DEADLINE", "Preempted": "PREEMPTED"}
_NEVER = ("", "None", "N/A", "Unknown")


class Stop(NamedTuple):
    """What stopped a run, and when."""

    reason: str
    at: str


def parse(text: str, *, now: float) -> Stop:
    """From `at=SECONDS end=SECONDS` and the line of `scontrol show job`, which a controller that is down leaves out."""
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    at = float(fields.get("at") or now)
    return Stop(_reason(fields, at), utc(at))


def _reason(fields: dict[str, str], at: float) -> str:
    state = fields.get("JobState", "")
    if fields.get("PreemptTime", "") not in _NEVER:
        state = "PREEMPTED"
    state = _BY_REASON.get(fields.get("Reason", ""), state)
    if state in _BY_STATE:
        return _BY_STATE[state]
    if fields.get("end") and at >= float(fields["end"]) - 1:
        return _BY_STATE["TIMEOUT"]
    # A job that nothing else ends was cancelled; one that runs on got a signal alone.
    return _BY_STATE["CANCELLED"] if state == "COMPLETING" else "a signal"


def utc(seconds: float | None = None) -> str:
    """A time as result.json has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
