"""Ask a run to save and end; its job is then not requeued."""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, DrayError, UnfitError, listed
from dray.runs import slurm
from dray.runs.result import result_of, summary
from dray.runs.slurm import Slurm
from dray.runs.status import State, status
from dray.runs.store import Run, RunPaths, find, newest_first, plan_of

Say = Callable[[str], None]
_LOOK_S = 0.3
_NOW_S = 15.0  # for the runners to end their ranks, with their grace and SIGKILL
_ASK_S = 10.0  # between queries to Slurm's controller, which all users share
_TRIES = 3


def newest(runs: Path | None) -> Path:
    """The newest run; ConfigError if several runs of this user are active."""
    found = find("", runs)
    known, active = Slurm(), dict[Path, str]()
    for run in newest_first(found.parent):
        if Run(run).owner == os.geteuid() and status(run, known).kind in ("queued", "starting", "running"):
            active.setdefault(run.resolve(), run.name)
    if len(active) > 1:
        names = [*active.values()]
        raise ConfigError(
            "several runs are active",
            where=found.parent,
            wanted="the name of one run",
            found=listed(names),
            fix=f"dray stop {names[0]}",
        )
    return found


def stop(run: Path, *, now: bool, wait: bool, say: Say) -> None:
    """Ask the run to end, or end it `now`; then wait for the end and print its summary."""
    for _ in range(_TRIES):
        state = status(run)
        if state.kind not in ("queued", "starting"):
            break
        if _cancel(state):
            say(f"the job was cancelled: {state.where}\n{_ending(state)}")
            return
    else:
        raise DrayError(
            "the job is still in the queue", where=state.where, fix="find it with squeue --me, then scancel JOB"
        )
    if state.kind == "ended":
        say(f"{run.name} has already ended\n{_ending(state)}")
    elif state.paths and not (state.kind == "unknown" and state.paths.result.exists()):
        _ask(state, state.paths, now=now, wait=wait, say=say)
    else:
        raise UnfitError(
            "this machine cannot tell whether the job has started",
            where=run,
            found=state.unclear,
            fix="run dray stop again when squeue lists the job here",
        )


def _cancel(state: State) -> bool:
    """Cancel the job of a run, unless it is an allocation by salloc; False if it waited and started meanwhile."""
    job = state.slurm_job
    assert job
    if state.paths and not job.waits:
        shown = slurm.show(job.id, state.cluster)
        if not shown:
            raise UnfitError(
                "Slurm does not tell whether the job is your allocation, which would end with the run",
                where=state.where,
                fix=f"run dray stop again; scancel {job.id} ends all of the job",
            )
        if not slurm.is_batch(shown):
            raise ConfigError(
                "the run is in your allocation, which would end with it",
                where=state.where,
                fix="press Ctrl-C where you started the run; scancel ends the whole allocation",
            )
    slurm.cancel(job, state.cluster, waiting=job.waits)
    if job.waits and job.id in {other.id for other in slurm.jobs(state.cluster)}:
        return False
    _record_stop(state)
    return True


def _record_stop(state: State) -> None:
    """Write the stop into job.json, because a run without an attempt has no result."""
    queued = Run(state.path).job
    if queued and not state.paths:
        stopped = queued.model_copy(update={"stopped": time.time()})
        with suppress(OSError):  # the job is cancelled anyway
            files.write_atomic(state.path / run_folder.JOB, stopped.model_dump_json(indent=1))


def _ask(state: State, paths: RunPaths, *, now: bool, wait: bool, say: Say) -> None:
    """Ask the runners of an attempt, and wait for its end."""
    _write(paths, now=now and wait)
    how = "is being ended now" if now else "was asked to save and end"
    say(f"{state.run}, attempt {paths.attempt} {how}: {state.where}")
    grace = _NOW_S if now else _grace(paths)
    if not now and grace < math.inf:
        ended = f"after {grace:g} s it ends processes that still run"
        say(f"the program gets SIGUSR1 to save and end; while dray stop waits, {ended}")
    if not now and state.kind == "unknown":
        say("this machine cannot tell whether it still runs; dray stop --no-wait does not wait for its end")
    if wait:
        say(_wait(state, paths, grace, now=now, say=say))
    elif now:
        _end(state)


def _write(paths: RunPaths, *, now: bool) -> None:
    """Write the stop file, which the first node's runner reads each second; with `now` it ends the ranks at once."""
    lines = f"{run_folder.BY_USER}\n{run_folder.NOW}\n" if now else f"{run_folder.BY_USER}\n"
    try:
        handle = os.open(paths.stop, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        os.write(handle, lines.encode())
        os.close(handle)
    except OSError as refused:
        raise ConfigError(
            "the stop file cannot be written",
            where=paths.stop,
            wanted="a file that you may write",
            found=refused.strerror,
            fix="repair the folder's permissions, or cancel the job with scancel",
        ) from refused


def _wait(state: State, paths: RunPaths, grace: float, *, now: bool, say: Say) -> str:
    """The summary of the ended run. A program that ignores SIGUSR1 is ended after the plan's grace.

    If the runners do not end the run `now`, the job is cancelled.
    """
    asked = time.monotonic()
    deadline = asked + grace
    gone = False
    while (result := result_of(paths)) is None:
        time.sleep(_LOOK_S)
        at = time.monotonic()
        if at > deadline and now:
            deadline = math.inf
            _end(state)
        elif at > deadline:
            say(f"it did not end within {grace:g} s and is being ended now")
            now, deadline = True, at + _NOW_S
            _write(paths, now=True)
        if at > asked + _ASK_S:
            asked, before = at, gone
            gone = status(state.path).kind in ("ended", "queued")
            # On a shared disk the result may appear after Slurm shows the job's end.
            if gone and before and result_of(paths) is None:
                return f"it ended without a result; {_why(state)} shows more\nrun folder: {state.path}"
    return summary(result, paths)


def _end(state: State) -> None:
    """Send SIGTERM now; the trainer then saves if Slurm's KillWait leaves enough time."""
    if state.process:
        with suppress(ProcessLookupError):
            os.kill(state.process, signal.SIGTERM)
    elif state.slurm_job:
        _cancel(state)
    else:
        raise UnfitError(
            "the run cannot be ended from this machine",
            found=state.unclear,
            fix="run dray stop there, or without --now",
        )


def _grace(paths: RunPaths) -> float:
    """The plan's grace for a command; endless for dray's trainer, which ends by itself after its checkpoint."""
    with suppress(DrayError, OSError):  # without a readable plan, do not end a run that may be saving
        plan = plan_of(paths)
        if plan.recipe.train is None:
            return float(plan.grace_s)
    return math.inf


def _ending(state: State) -> str:
    """How the last attempt ended."""
    if state.paths is None:
        return f"the run never started\nrun folder: {state.path}"
    result = result_of(state.paths)
    return summary(result, state.paths) if result else f"it left no result; {_why(state)} shows more"


def _why(state: State) -> str:
    return f"dray why {shlex.quote(str(state.path))}"
