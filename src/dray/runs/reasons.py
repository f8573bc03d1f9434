"""Why a job waits: Slurm's reasons in plain words."""

from __future__ import annotations

_MEANINGS = {
    "None": "Slurm gives no reason yet",
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


def meaning(reason: str) -> str:
    """A reason of Slurm's in plain words; empty where the reason is none, or unknown here."""
    reason = reason.partition(",")[0].strip("()")
    if reason in _MEANINGS:
        return _MEANINGS[reason]
    return next((text for begins, text in _BEGINNINGS.items() if reason.startswith(begins)), "")
