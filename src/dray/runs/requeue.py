"""Decide whether an unfinished run's job is requeued: only if the attempt saved a checkpoint."""

from __future__ import annotations

import re

from dray.contract import exit_codes
from dray.planning.schema import Plan
from dray.planning.world import fewer
from dray.runs.result import Next, Result
from dray.runs.stop_reason import PREEMPTION, TIME_LIMIT

_NO_NODE_S = ("the disk is full", "disk quota exceeded")
"""Causes that another node would meet too."""
_OPTIONS = {
    "job-name": "JobName", "account": "Account", "qos": "QOS", "partition": "Partition", "time": "TimeLimit",
    "constraint": "Features", "reservation": "Reservation", "licenses": "Licenses", "mem": "MinMemoryNode",
    "mem-per-cpu": "MinMemoryCPU", "cpus-per-task": "CPUs/Task", "gres": "TresPerNode", "exclude": "ExcNodeList",
    "mail-user": "MailUser", "mail-type": "MailType", "chdir": "WorkDir", "output": "StdOut",
}  # fmt: skip
"""Options of sbatch, and where `scontrol show job` has their values."""
# A value may have spaces: it ends before the next field.
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|$)", re.MULTILINE)


def decide(result: Result, plan: Plan, *, batch: bool) -> Next | None:
    """What comes next; None if the run ended, was cancelled, or would fail in the same way.

    Only a `batch` job can be requeued; a run in an salloc allocation may continue on other or fewer nodes.
    """
    unfit = _unfit(result)
    failed = unfit or _lost(result)
    if failed and (why := _without(plan, len(failed))):
        return Next(requeue=False, spare=True, exclude=failed, why=why)
    if not batch or not (unfit or _may_continue(result)):
        return None
    limit, used = plan.recipe.max_requeues, sum(attempt.requeued for attempt in result.history)
    saved = result.command or (result.saved_step or 0) > (result.first_step or 0)
    if not limit:
        return Next(requeue=False, why="set max_requeues=3 in the recipe, and dray requeues such a job")
    if used >= limit:
        return Next(requeue=False, why=f"max_requeues = {limit} is used up")
    if not unfit and not saved:
        return Next(requeue=False, why="this attempt saved no checkpoint, so the next would repeat it")
    return Next(requeue=True, exclude=unfit, why=f"{used + 1} of {limit}")


def _without(plan: Plan, failed: int) -> str:
    """How the job continues at once without that many nodes; empty if it cannot."""
    world, recipe = plan.world, plan.recipe
    if failed <= len(world.spares):
        return f"spare nodes take over: {' '.join(world.spares[:failed])}"
    count = fewer(recipe, world.ranks_per_node, len(world.nodes) + len(world.spares) - failed)
    return f"fewer nodes: {count} of {len(world.nodes)} continue (min_nodes = {recipe.min_nodes})" if count else ""


def _may_continue(result: Result) -> bool:
    """A command alone knows whether another attempt would resume, and says so by exit code 75."""
    asked_again = result.exit_code == exit_codes.RETRY
    if result.status == "failed" or result.reason == "SIGUSR1":  # by sbatch --signal, any time before the end
        return asked_again
    return result.reason in (TIME_LIMIT, PREEMPTION) and (asked_again or not result.command)


def _lost(result: Result) -> list[str]:
    """The node that was lost."""
    cause = result.cause
    if cause and cause.code == exit_codes.RETRY and cause.rank is None and cause.node in result.hosts:
        return [cause.node]
    return []


def _unfit(result: Result) -> list[str]:
    """The nodes found unfit; none if all nodes are, because then the nodes are not the reason."""
    cause, hosts = result.cause, result.hosts
    if not cause or cause.code != exit_codes.UNFIT or cause.name in _NO_NODE_S or cause.node not in hosts:
        return []
    nodes = result.failing_nodes or [cause.node]
    return [] if 1 < len(nodes) == len(hosts) else nodes


def options(known: str, plan: Plan, exclude: list[str]) -> list[str]:
    """Options of sbatch for a job like the one that scontrol shows in `known`, without the nodes in `exclude`.

    Where Slurm does not put jobs back, the batch script submits such a job. Empty if scontrol did not answer.
    """
    shown = {key: value for key, value in _FIELD.findall(known) if value not in ("", "(null)", "N/A")}
    if "JobName" not in shown:
        return []
    shown["ExcNodeList"] = ",".join([*filter(None, [shown.get("ExcNodeList")]), *exclude])
    shown["TresPerNode"] = shown.get("TresPerNode", "").replace("gres/gpu", "gpu").replace("gres/", "")
    # The next job is no task of an array, and would take these for other numbers.
    for pattern, field in (("%A", "ArrayJobId"), ("%a", "ArrayTaskId")):
        shown["StdOut"] = shown.get("StdOut", "").replace(pattern, shown.get(field, pattern))
    no_value = {"mem": "0", "mem-per-cpu": "0"}  # --mem=0 would be all of it
    values = {option: shown.get(field, "") for option, field in _OPTIONS.items()}
    found = [f"--{option}={value}" for option, value in values.items() if value not in ("", no_value.get(option))]
    found += ["--open-mode=append"] if shown["StdOut"] else []
    found += ["--exclusive"] if shown.get("OverSubscribe") == "NO" else []
    found += ["--no-kill"] if plan.recipe.replaces_nodes else []
    return [*found, f"--signal=B:USR1@{plan.grace_s}"]  # which scontrol does not tell
