"""This user's jobs in Slurm's queue, by one call of squeue, and its reasons in plain words."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from dray import process
from dray.contract.findings import DrayError
from dray.fitness import host

_ASK_S = 10.0
_FIELDS = ("%A", "%T", "%r", "%S", "%o")  # number, state, reason, start, command; the last may have any character
_MEANINGS = {
    "Priority": "jobs with a higher priority are before it",
    "Resources": "it waits for nodes that are free",
    "BeginTime": "its time to begin has not come; Slurm starts a requeued job after two minutes",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job that it waits for has failed, so it never starts: scancel it",
    "PartitionTimeLimit": "it asks for more time than the partition allows, so it never starts: a shorter --time",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows: fewer --nodes",
    "PartitionDown": "the partition starts no jobs now",
    "PartitionInactive": "the partition starts no jobs now",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved, often for a maintenance",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for a license",
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "as many tasks of its array run as it allows",
    "BadConstraints": "no node has what it asks for, so it never starts",
    "InvalidAccount": "its account is not valid: --account",
    "InvalidQOS": "its quality of service is not valid: --qos",
    "launch failed requeued held": "Slurm could not start it and holds it: scontrol release lets it go",
}
_BEGINNINGS = {
    "QOS": "a limit of its quality of service (QOS) is reached",
    "Assoc": "a limit of its account or user is reached",
    "MaxCpuPerAccount": "a limit of its account is reached",
    "ReqNodeNotAvail": _MEANINGS["ReqNodeNotAvail"],
    "Nodes required": _MEANINGS["ReqNodeNotAvail"],
    "Job": "the job's own limits or its state keep it waiting",
}


class Job(NamedTuple):
    """What squeue tells of one."""

    number: int
    state: str
    reason: str
    start: float | None
    """When it started; while it waits, when Slurm expects to start it, or may at the earliest."""
    command: str

    @property
    def waits(self) -> bool:
        """Whether it has not been given nodes."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class Queue:
    """Asked once, when the first run's files do not tell how it is."""

    @cached_property
    def jobs(self) -> dict[int, Job] | None:
        """By their numbers; None where this machine has no Slurm, or Slurm does not answer."""
        if not process.which("squeue"):
            return None
        # The user's own SQUEUE_PARTITION and its like would hide jobs.
        hidden = [f"--unset={name}" for name in os.environ if name.startswith("SQUEUE_")]
        argv = [*(["env", *hidden] if hidden else []), "squeue", "--noheader", f"--user={_user()}"]
        argv.append(f"--format={'|'.join(_FIELDS)}")
        env = {"SLURM_TIME_FORMAT": "standard"}
        try:
            done = process.run(argv, env=env, check=False, seconds=_ASK_S)
        except (DrayError, OSError):
            return None
        if done.code:
            return None
        found = filter(None, map(_job, done.out.splitlines()))
        return {job.number: job for job in sorted(found, key=lambda job: job.waits, reverse=True)}

    @cached_property
    def cluster(self) -> str:
        """What Slurm calls the cluster that was asked."""
        return host.cluster_name() if self.jobs is not None else ""

    def of(self, job: int | None, folders: Iterable[str] = ()) -> Job | None:
        """The job with this number, or one that goes on in such a run folder (`--run=`)."""
        jobs = self.jobs or {}
        if job in jobs:
            return jobs[job]
        options = [f" --run={folder} " for folder in folders]
        return next((one for one in jobs.values() if any(option in f"{one.command} " for option in options)), None)


def meaning(reason: str) -> str:
    """A reason of Slurm's in plain words; empty where the reason is none, or unknown here."""
    reason = reason.partition(",")[0].strip("()")
    if reason in _MEANINGS:
        return _MEANINGS[reason]
    return next((text for begins, text in _BEGINNINGS.items() if reason.startswith(begins)), "")


def _job(line: str) -> Job | None:
    fields = line.split("|", len(_FIELDS) - 1)
    if len(fields) < len(_FIELDS) or not fields[0].isdecimal():
        return None
    number, state, reason, start, command = fields
    return Job(int(number), state, reason, _time(start), command.strip())


def _time(text: str) -> float | None:
    """Of this machine's zone, as Slurm prints it."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
