"""`dray status`: the state of a run, while it waits, while it runs and after its end."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import times
from dray.cli.args import Run, Runs
from dray.cli.on import On, hand_over
from dray.contract.control_characters import cell
from dray.contract.findings import counted
from dray.runs import cost, startup, state
from dray.runs.look import look
from dray.runs.named import find
from dray.runs.paths import RunPaths
from dray.runs.result import read, summary
from dray.runs.squeue import Queue
from dray.runs.stages import duration
from dray.runs.state import State

_NODES = 8
_UNTOLD = {
    state.LOST: "the run was killed before it could write a result",
    state.NO_RESULT: "the run is active, or was killed before it could write a result",
}


def status(
    run: Run = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show the state of a run: why it waits and until when, which stage or step it has reached, or how it ended.

    dray status 4711
    """
    hand_over(on)
    seen = look(find(run, runs), Queue(), closely=True)
    print(seen.model_dump_json(indent=1) if as_json else "\n".join(text(seen)))


def text(seen: State) -> list[str]:
    """The state in a few lines."""
    lines = [head(seen), *waiting(seen)]
    start = [f"  {line}" for line in startup.lines(seen.startup)]
    start += [f"  cost: {cost.text(seen.spent)}"] if seen.spent else []
    if seen.attempt and seen.state != state.RUNNING and (ended := _last_words(seen)):
        return [*lines, *start, *ended]
    lines += [*(running(seen) if seen.live else []), *start]
    lines += [f"  {seen.why}"] if seen.why and not seen.live else []
    if seen.attempt and seen.state == state.STOPPED:
        lines.append(f"  stopped by {seen.why} {times.local(seen.finished)}, before it could write a result")
    if seen.attempt and seen.state in _UNTOLD:
        lines.append(f"  {_UNTOLD[seen.state]}: dray why {seen.run}")
    lines += [f"warning: {one}" for one in seen.warnings]
    return [*lines, f"run folder: {seen.folder}"]


def head(seen: State) -> str:
    """One line: name, state, recipe, attempt, job and nodes."""
    parts = [seen.recipe] if seen.recipe else []
    parts += [f"attempt {seen.attempt}"] if seen.attempt else []
    parts += [f"job {seen.job_id or seen.job}"] if seen.job else []
    where = " ".join(seen.nodes[:_NODES]) + " ..." * (len(seen.nodes) > _NODES)
    parts += [f"{counted(seen.ranks, 'rank')} on {where}"] if seen.ranks and seen.nodes else []
    return cell(f"{seen.run}: {seen.state}" + (f" ({', '.join(parts)})" if parts else ""))


def waiting(seen: State) -> list[str]:
    """What Slurm shows of a job in the queue."""
    told = seen.waiting
    if told is None:
        if seen.state != state.QUEUED:
            return []
        return [
            f"  job {seen.job_id or seen.job} was submitted {times.local(seen.started)}; Slurm gives no details here"
        ]
    why = ": ".join(word for word in (told.reason, told.meaning) if word not in ("", "None"))
    lines = [f"  Slurm: job {told.id or told.job} {told.state}{', ' * bool(why)}{why}"]
    if told.start:
        at, when = times.seconds(told.start), times.local(told.start)
        left = max(0.0, (at or 0.0) - time.time())
        kind = "not before" if told.reason == "BeginTime" else "expected start"
        change = "" if told.reason == "BeginTime" else "; Slurm's estimate, which changes with the queue"
        lines.append(f"  {kind}: {when} (in {duration(left)}){change}")
    else:
        lines.append("  expected start: Slurm has no estimate yet")
    return [*lines, f"  earlier attempts: {seen.attempts}"] if seen.attempts else lines


def running(seen: State) -> list[str]:
    """Stage, step, speed, and notes about nodes."""
    live = seen.live
    if live is None:
        return []
    lines = [f"  {'stage' if seen.state == state.RUNNING else 'stage reached'}: {live.stage}"]
    if seen.step is not None:
        lines.append(f"  {figures(seen)}")
    if live.stages:
        after = ", ".join(f"{one.name} after {duration(one.s)}" for one in live.stages)
        lines.append(f"  began {times.local(seen.attempt_started)}; {after}")
    elif seen.attempt_started:
        lines.append(f"  began {times.local(seen.attempt_started)}")
    if live.quiet_s is not None:
        lines.append(f"  last sign of life: {duration(live.quiet_s)} ago")
    lines += [f"  {one.name}: {', '.join(one.notes)}" for one in live.nodes if one.notes]
    lines += [f"  restarts: {live.restarts}"] if live.restarts else []
    about = {note for one in live.nodes for note in one.notes}
    return lines + [f"  {note}" for note in live.notes if note not in about]


def figures(seen: State) -> str:
    """Step, loss, speed, time left."""
    parts = [f"step {seen.step:,}" + (f" of {seen.steps:,}" if seen.steps else "")] if seen.step is not None else []
    parts += [f"loss {seen.loss:.4f}"] if seen.loss is not None else []
    parts += [f"{seen.tokens_per_s:,.0f} tokens/s"] if seen.tokens_per_s else []
    parts += [f"{duration(seen.left_s)} left"] if seen.left_s is not None else []
    return "  ".join(parts)


def _last_words(seen: State) -> list[str]:
    """The summary of an attempt that has a result."""
    paths = RunPaths(Path(seen.folder), seen.attempt or 1)
    with suppress(OSError, ValueError):
        return summary(read(paths.result), paths).splitlines()
    return []
