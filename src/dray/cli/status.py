"""`dray status`: the state of a run, while it waits, while it runs and after its end."""

from __future__ import annotations

import shlex
import time

from dray.cli import times
from dray.cli.args import Json, Run, Runs
from dray.cli.on import On, hand_over
from dray.contract.control_characters import cell
from dray.contract.findings import counted, duration
from dray.runs import metrics
from dray.runs import status as statuses
from dray.runs.result import result_of, summary
from dray.runs.slurm import meaning
from dray.runs.status import State, utc
from dray.runs.store import find

_NODES = 8
_NO_RESULT = {
    statuses.STOPPED: "stopped by {why} {at}, before it could write a result",
    statuses.LOST: "the run was killed before it could write a result: dray why {folder}",
    statuses.NO_RESULT: "the run is active, or was killed before it could write a result: dray why {folder}",
}
"""What is told of an attempt without a result."""


def status(
    run: Run = "",
    as_json: Json = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show the state of a run: why it waits and until when, which stage or step it has reached, or how it ended.

    dray status 4711
    """
    hand_over(on)
    seen = statuses.status(find(run, runs), closely=True)
    print(seen.model_dump_json(indent=1) if as_json else "\n".join(text(seen)))


def text(seen: State) -> list[str]:
    """The state in a few lines."""
    lines = [head(seen), *waiting(seen)]
    start = [f"  {metrics.startup_text(seen.startup)}"] if seen.startup else []
    if seen.spent:
        start.append(f"  cost: {metrics.cost_text(seen.spent)}")
    result = result_of(seen.paths) if seen.paths and seen.state != statuses.RUNNING else None
    if result and seen.paths:
        return [*lines, *start, *summary(result, seen.paths).splitlines()]
    lines += [*running(seen), *start]
    if seen.attempt and seen.state in _NO_RESULT:
        told = _NO_RESULT[seen.state]
        at, folder = times.local(seen.finished), shlex.quote(seen.folder)
        lines.append("  " + told.format(why=seen.why, at=at, folder=folder))
    elif seen.why:
        lines.append(f"  {seen.why}")
    lines += [f"warning: {warning}" for warning in seen.warnings]
    return [*lines, f"run folder: {seen.folder}"]


def head(seen: State) -> str:
    """One line: name, state, recipe, attempt, job and nodes."""
    parts = [seen.recipe] if seen.recipe else []
    parts += [f"attempt {seen.attempt}"] if seen.attempt else []
    parts += [f"job {seen.job_id}"] if seen.job_id else []
    nodes = " ".join(seen.nodes[:_NODES]) + " ..." * (len(seen.nodes) > _NODES)
    parts += [f"{counted(seen.ranks, 'rank')} on {nodes}"] if seen.ranks and nodes else []
    return cell(f"{seen.run}: {seen.state}" + (f" ({', '.join(parts)})" if parts else ""))


def waiting(seen: State) -> list[str]:
    """What Slurm shows of a job in the queue."""
    job = seen.waiting
    if job is None:
        submitted = f"  job {seen.job_id} was submitted {times.local(seen.started)}; Slurm gives no details here"
        return [submitted] if seen.state == statuses.QUEUED else []
    why = ": ".join(word for word in (job.reason, meaning(job.reason)) if word not in ("", "None"))
    lines = [f"  Slurm: job {job.id} {job.state}{', ' * bool(why)}{why}"]
    if job.start is None:
        lines.append("  expected start: Slurm has no estimate yet")
    else:
        left = duration(max(0.0, job.start - time.time()))
        when = f"{times.local(utc(job.start))} (in {left})"
        estimate = f"  expected start: {when}; Slurm's estimate, which changes with the queue"
        lines.append(f"  not before: {when}" if job.reason == "BeginTime" else estimate)
    return [*lines, f"  earlier attempts: {seen.attempts}"] if seen.attempts else lines


def running(seen: State) -> list[str]:
    """Stage, step, speed, and notes."""
    live = seen.live
    if live is None:
        return []
    lines = [f"  stage: {live.stage}"]
    if seen.step is not None:
        parts = [f"step {seen.step:,}" + (f" of {seen.steps:,}" if seen.steps else "")]
        parts += [f"loss {seen.loss:.4f}"] if seen.loss is not None else []
        parts += [f"{seen.tokens_per_s:,.0f} tokens/s"] if seen.tokens_per_s else []
        parts += [f"{duration(seen.left_s)} left"] if seen.left_s is not None else []
        lines.append("  " + "  ".join(parts))
    if seen.started:
        lines.append(f"  began {times.local(seen.started)}")
    if live.quiet_s is not None:
        lines.append(f"  last sign of life: {duration(live.quiet_s)} ago")
    if live.restarts:
        lines.append(f"  restarts: {live.restarts}")
    return lines + [f"  {note}" for note in live.notes]
