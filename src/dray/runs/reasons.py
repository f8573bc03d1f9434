"""Slurm's reasons for a waiting job, in plain words."""

from __future__ import annotations

_MEANINGS = {
    "None": "Slurm gives no reason yet",
    "Priority": "jobs with a higher priority run first",
    "Resources": "it waits for free nodes",
    "BeginTime": "its begin time has not come; Slurm waits two minutes before it starts a requeued job",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job that it depends on failed, so it never starts: cancel it with scancel",
    "PartitionTimeLimit": "it asks for more time than the partition allows, so it never starts: use a shorter --time",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows: use fewer --nodes",
    "PartitionDown": "the partition starts no jobs at the moment",
    "PartitionInactive": "the partition starts no jobs at the moment",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved, often for maintenance",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for a license",
    "JobHeldUser": "its user holds it: scontrol release JOB releases it",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "its array already runs the allowed number of tasks",
    "BadConstraints": "no node has the features that it asks for, so it never starts",
    "InvalidAccount": "its account is invalid: use another --account",
    "InvalidQOS": "its quality of service is invalid: use another --qos",
    "launch failed requeued held": "Slurm could not start it and holds it: scontrol release JOB releases it",
}
_BEGINNINGS = {
    "QOS": "a limit of its quality of service (QOS) is reached",
    "Assoc": "a limit of its account or user is reached",
    "MaxCpuPerAccount": "a limit of its account is reached",
    "ReqNodeNotAvail": _MEANINGS["ReqNodeNotAvail"],
    "Nodes required": _MEANINGS["ReqNodeNotAvail"],
    "Job": "its own limits or its state keep it waiting",
}


def meaning(reason: str) -> str:
    """Slurm's reason in plain words; empty if it is unknown."""
    reason = reason.partition(",")[0].strip("()")
    if reason in _MEANINGS:
        return _MEANINGS[reason]
    return next((text for begins, text in _BEGINNINGS.items() if reason.startswith(begins)), "")
