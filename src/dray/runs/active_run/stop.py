"""Ask a run to save and end; its job is then not requeued."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, UnfitError
from dray.runs import slurm
from dray.runs.metrics import number
from dray.runs.result import result_of, summary
from dray.runs.status import State, status
from dray.runs.store import Attempt, Run, RunPaths, dig

Say = Callable[[str], None]
_LOOK_S = 0.3
_NOW_S = 30.0  # for the runners to end their ranks, with their grace and SIGKILL, and to write the result
_ASK_S = 10.0  # between queries to Slurm's controller, which all users share


def stop_run(run: Path, *, now: bool, wait: bool, say: Say) -> None:
    """Ask the run to end, or end it `now`; then wait for the end and print its summary."""
    state = status(run)
    if state.kind in ("queued", "starting"):
        if _cancel(state):
            say(f"the job was cancelled: {state.where}\n{_ending(state)}")
            return
        state = status(run)  # its job has started meanwhile
    paths = state.paths
    if state.kind == "ended":
        say(f"{run.name} has already ended\n{_ending(state)}")
        return
    if not paths or state.kind in ("queued", "starting") or (state.kind == "unknown" and paths.result.exists()):
        raise UnfitError(
            "this machine cannot tell whether the job has started",
            where=run,
            found=state.where,
            fix="run dray stop again when squeue lists the job here",
        )
    _write(paths, now=now)
    how = "is being ended now" if now else "was asked to save and end"
    say(f"{state.run}, attempt {paths.attempt} {how}: {state.where}")
    if wait:
        say(_wait(state, paths, now=now, say=say))


def _cancel(state: State) -> bool:
    """Cancel the job of a run, unless it is an allocation by salloc; False if it waited and started meanwhile."""
    job, paths = state.slurm_job, state.paths
    assert job
    if paths and not job.waits and not slurm.is_batch(slurm.show(job.id, state.cluster)):
        raise UnfitError(
            "the job may be your allocation by salloc, which would end with the run",
            where=state.where,
            wanted="a batch job, as scontrol show job tells",
            fix=f"press Ctrl-C where you started the run; scancel {job.id} ends the whole job",
        )
    slurm.cancel(job, state.cluster, waiting=job.waits)
    if job.waits and job.id in {other.id for other in slurm.jobs(state.cluster)}:
        return False
    queued = Run(state.path).job
    if queued and not paths:  # a run without an attempt has no result
        stopped = queued.model_copy(update={"stopped": time.time()})
        with suppress(OSError):  # the job is cancelled anyway
            files.write_atomic(state.path / run_folder.JOB, stopped.model_dump_json(indent=1))
    return True


def _write(paths: RunPaths, *, now: bool) -> None:
    """Write the stop file, which the first node's runner reads each second; with `now` it ends the ranks at once."""
    lines = f"{run_folder.BY_USER}\n" + f"{run_folder.NOW}\n" * now
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would wait for ever
    try:
        file = os.open(paths.stop, flags, 0o600)
        os.write(file, lines.encode())
        os.close(file)
    except OSError as refused:
        raise ConfigError(
            "the stop file cannot be written",
            where=paths.stop,
            found=refused.strerror,
            fix="repair the folder's permissions, or cancel the job with scancel",
        ) from refused


def _wait(state: State, paths: RunPaths, *, now: bool, say: Say) -> str:
    """The summary of the ended run. A program that ignores SIGUSR1 is ended after the plan's grace."""
    grace = _NOW_S if now else _grace(paths)
    if not now and grace < math.inf:
        say(f"the program gets SIGUSR1 to save and end; after {grace:g} s dray stop ends it")
    asked = time.monotonic()
    deadline = asked + grace
    gone = False
    while (result := result_of(paths)) is None:
        time.sleep(_LOOK_S)
        at = time.monotonic()
        if at > deadline and now:
            raise UnfitError(
                f"the run has not ended within {_NOW_S:g} s",
                where=state.where,
                fix="end its job by scancel, or its process by kill",
            )
        if at > deadline:
            say(f"it did not end within {grace:g} s and is being ended now")
            now, deadline = True, at + _NOW_S
            _write(paths, now=True)
        if at > asked + _ASK_S:
            asked, before = at, gone
            gone = status(state.path).kind in ("ended", "queued")
            # On a shared disk the result may appear after Slurm shows the job's end.
            if gone and before:
                return _ending(state)
    return summary(result, paths)


def _grace(paths: RunPaths) -> float:
    """The plan's grace for a command; endless for dray's trainer, which ends by itself after its checkpoint."""
    plan = Attempt(Run(paths.run), paths.attempt).plan  # without a readable one, end no run that may be saving
    seconds = number(plan, "grace_s")
    return seconds if seconds and dig(plan, "recipe", "command") else math.inf


def _ending(state: State) -> str:
    """How the last attempt ended."""
    if state.paths is None:
        return f"the run never started\nrun folder: {state.path}"
    result = result_of(state.paths)
    if result:
        return summary(result, state.paths)
    return f"it left no result; dray why {shlex.quote(str(state.path))} shows more"
