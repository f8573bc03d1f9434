"""Decide whether an unfinished run's job is requeued: only if the attempt saved a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from dray import hostlist
from dray.contract import exit_codes, files
from dray.contract.findings import DrayError
from dray.contract.hostnames import compress
from dray.planning.schema import Plan
from dray.planning.world import fewer
from dray.runs.recovery import Next
from dray.runs.result import Attempt, Result, result_of
from dray.runs.stop import PREEMPTION, TIME_LIMIT
from dray.runs.store import RunPaths, attempts

_NO_NODE_S = ("the disk is full", "disk quota exceeded")
"""Causes that another node would meet too."""
_HOST = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def history(paths: RunPaths) -> list[Attempt]:
    """The earlier attempts in order, with those that left no result (a node died, for example)."""
    return [_before(RunPaths(paths.run, number)) for number in attempts(paths.run) if number < paths.attempt]


def _before(paths: RunPaths) -> Attempt:
    if result := result_of(paths):
        return attempt(result, paths.attempt)
    return Attempt(attempt=paths.attempt, status="unknown", why="it left no result")


def failing_nodes(paths: RunPaths, plan: Plan | None) -> list[str]:
    """The plan's nodes that failed their node check."""
    try:
        named = files.read(paths.failing_nodes).decode().strip().split(",")
    except FileNotFoundError:
        return []
    return [node.name for node in plan.world.nodes if node.name in {*named}] if plan else []


def attempt(result: Result, number: int) -> Attempt:
    """The summary of this attempt that later results keep."""
    why = result.cause.why.partition("\n")[0] if result.cause else result.reason
    return Attempt(
        attempt=number,
        status=result.status,
        exit_code=result.exit_code,
        why=why,
        hosts=compress(result.hosts),
        first_step=result.first_step,
        steps=result.steps,
        saved_step=result.saved_step,
        lost_s=result.lost_s,
        finished=result.finished,
        requeued=bool(result.next and result.next.requeue),
        cost=result.cost,
    )


def decide(result: Result, plan: Plan | None, earlier: Sequence[Attempt], *, batch: bool) -> Next | None:
    """What comes next; None if the run ended, was cancelled, or would fail in the same way.

    Only a `batch` job can be requeued; a run in an salloc allocation may continue on other or fewer nodes.
    """
    exclude = _unfit(result, earlier)
    failed = exclude or _lost(result)
    if plan and failed and (why := _without(plan, len(failed))):
        return Next(requeue=False, spare=True, exclude=failed, why=why)
    if plan is None or not batch or not (exclude or _may_go_on(result)):
        return None
    limit, used = plan.recipe.max_requeues, sum(one.requeued for one in earlier)
    if not limit:
        return Next(requeue=False, why="set max_requeues=3 in the recipe, and dray requeues such a job")
    if used >= limit:
        return Next(requeue=False, why=f"max_requeues = {limit} is used up")
    if not exclude and not _saved(result):
        return Next(requeue=False, why="this attempt saved no checkpoint, so the next would repeat it")
    return Next(requeue=True, exclude=exclude, why=f"{used + 1} of {limit}")


def _without(plan: Plan, failed: int) -> str:
    """How the job continues at once without that many nodes; empty if it cannot."""
    world = plan.world
    if failed <= len(world.spares):
        spares = " ".join(world.spares[:failed])
        return f"spare nodes: {spares} take their place" if failed > 1 else f"spare node: {spares} takes its place"
    count = fewer(plan.recipe, world.ranks_per_node, len(world.nodes) + len(world.spares) - failed)
    return f"fewer nodes: {count} of {len(world.nodes)} continue (min_nodes = {plan.recipe.min_nodes})" if count else ""


def _may_go_on(result: Result) -> bool:
    """A command alone knows whether another attempt would resume, and says so by exit code 75."""
    if result.status == "failed" or result.reason == "SIGUSR1":  # by sbatch --signal, any time before the end
        return result.exit_code == exit_codes.RETRY
    ended = result.reason in (TIME_LIMIT, PREEMPTION)
    return ended and (result.exit_code == exit_codes.RETRY or not result.command)


def _saved(result: Result) -> bool:
    return result.command or (result.saved_step or 0) > (result.first_step or 0)


def _lost(result: Result) -> list[str]:
    """The node that was lost."""
    cause = result.cause
    gone = cause and cause.code == exit_codes.RETRY and cause.rank is None and cause.node in result.hosts
    return [cause.node] if cause and gone and _HOST.fullmatch(cause.node) else []


def _names(one: Attempt) -> list[str]:
    with suppress(DrayError):
        return hostlist.expand(one.hosts)
    return []


def _unfit(result: Result, earlier: Iterable[Attempt]) -> list[str]:
    """The nodes found unfit; none if all nodes are, or if another node failed earlier for the same reason.

    In both cases the nodes are not the reason.
    """
    cause = result.cause
    if (
        not cause
        or cause.name in _NO_NODE_S
        or cause.code != exit_codes.UNFIT
        or cause.node not in result.hosts
        or not _HOST.fullmatch(cause.node)
    ):
        return []
    nodes = [name for name in result.failing_nodes if _HOST.fullmatch(name)] or [cause.node]
    if 1 < len(nodes) == len(result.hosts):
        return []
    why = cause.why.partition("\n")[0].replace(cause.node, "")
    unfit = (one for one in earlier if one.exit_code == exit_codes.UNFIT)
    seen = ((one.why or "").replace(host, "") for one in unfit for host in _names(one))
    return [] if why in seen else nodes
