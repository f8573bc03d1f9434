"""Ask a run to save and end; its job is then not requeued."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, DrayError, UnfitError, listed
from dray.runs import slurm, status
from dray.runs.result import left, next_command, result_of, summary
from dray.runs.status import State
from dray.runs.store import Run, RunPaths, find, newest_checkpoint, newest_first
from dray.runs.write import read

Say = Callable[[str], None]
_LOOK_S = 0.3
_NOW_S = 15.0  # for the runners to end their ranks, with their grace and SIGKILL
_ASK_S = 10.0  # between queries to Slurm's controller, which all users share
_TRIES = 3
_GOES_ON = ("queued", "starting", "running")


def newest(runs: Path | None) -> Path:
    """The newest run; ConfigError if several runs of this user are active."""
    found = find("", runs)
    queue, going = slurm.Slurm(), dict[Path, str]()
    for run in newest_first(found.parent):
        with suppress(OSError):
            if run.stat().st_uid == os.geteuid() and status.status(run, queue).kind in _GOES_ON:
                going.setdefault(run.resolve(), run.name)
    if len(going) > 1:
        names = [*going.values()]
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
    told = ""
    for _ in range(_TRIES):
        state = status.status(run)
        if state.kind == "ended":
            say(_ended(state))
            return
        if state.kind == "queued":
            assert state.slurm_job
            if state.paths and not told:
                say(told := _before(state.paths))
            slurm.cancel(state.slurm_job, state.cluster, waiting=True)
            if state.slurm_job.id not in {job.id for job in slurm.jobs(state.cluster)}:
                _note(state)
                none = "" if state.paths else "; it never started"
                say(f"the job was waiting in the queue and was cancelled{none}\nrun folder: {run}")
                return
            continue  # the job started meanwhile
        break
    else:
        raise DrayError(
            "the job is still in the queue", where=state.where, fix="find it with squeue --me, then scancel JOB"
        )
    if state.kind == "starting":
        assert state.slurm_job
        if state.paths:  # between two attempts, perhaps in an salloc allocation
            _require_batch(state, state.slurm_job)
        slurm.cancel(state.slurm_job, state.cluster)
        _note(state)
        say(f"the job was cancelled before training began: {state.where}\nrun folder: {run}")
        return
    if state.paths is None or (state.kind == "unknown" and state.paths.result.exists()):
        raise UnfitError(
            "this machine cannot tell whether the job has started",
            where=run,
            found=state.unclear,
            fix="run dray stop again when squeue lists the job here",
        )
    _write(state.paths, now=now and wait)
    _say_asked(state, say, now=now)
    if wait:
        say(_last_words(state, say, now=now))
    elif now:
        _end(state)


def _note(state: State) -> None:
    """Record the stop in job.json, because a run without an attempt has no result."""
    queued = None if state.paths else Run(state.path).job
    if queued:
        told = queued.model_copy(update={"stopped": time.time()})
        with suppress(OSError):  # the job is cancelled anyway
            files.write_atomic(state.path / run_folder.JOB, told.model_dump_json(indent=1))


def _say_asked(state: State, say: Say, *, now: bool) -> None:
    assert state.paths
    how = "is being ended now" if now else "was asked to save and end"
    say(f"{state.path.name}, attempt {state.paths.attempt} {how}: {state.where}")
    if not now and (grace := _grace(state.paths)) is not None:
        ended = f"after {grace:g} s it ends processes that still run"
        say(f"the program gets SIGUSR1 to save and end; while dray stop waits, {ended}")
    if state.kind == "unknown" and not now:
        say("this machine cannot tell whether it still runs; dray stop --no-wait does not wait for its end")


def _write(paths: RunPaths, *, now: bool) -> None:
    """Write the stop file, which the first node's runner reads each second; with `now` it ends the ranks at once."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(paths.stop, flags, 0o600)
    except OSError as refused:
        raise ConfigError(
            "the stop file cannot be written", where=paths.stop, wanted="a file that you may write",
            found=refused.strerror, fix="repair the folder's permissions, or cancel the job with scancel",
        ) from refused  # fmt: skip
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ConfigError(
                "the stop file is no regular file", where=paths.stop, wanted="a file", found="something else"
            )
        lines = [run_folder.BY_USER, run_folder.NOW] if now else [run_folder.BY_USER]
        os.write(handle, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(handle)


def _end(state: State) -> None:
    """Send SIGTERM now; the trainer then saves if Slurm's KillWait leaves enough time."""
    if state.process:
        with suppress(ProcessLookupError):
            os.kill(state.process, signal.SIGTERM)
    elif state.slurm_job is None:
        raise UnfitError(
            "the run cannot be ended from this machine",
            found=state.unclear,
            fix="run dray stop there, or without --now",
        )
    else:
        _require_batch(state, state.slurm_job)
        slurm.cancel(state.slurm_job, state.cluster)


def _require_batch(state: State, job: slurm.Job) -> None:
    if not slurm.is_batch(slurm.show(job.id)):
        raise ConfigError(
            "the run is in your allocation, which would end with it",
            where=state.where,
            fix="press Ctrl-C where you started the run; scancel ends the whole allocation",
        )


def _last_words(state: State, say: Say, *, now: bool) -> str:
    """The summary of the ended run. A program that ignores SIGUSR1 is ended after the plan's grace.

    If the runners do not end the run `now`, the job is cancelled.
    """
    assert state.paths
    grace = _NOW_S if now else _grace(state.paths)
    begun = asked = time.monotonic()
    gone = False
    while (result := result_of(state.paths)) is None:
        time.sleep(_LOOK_S)
        time_ = time.monotonic()
        if grace is not None and time_ > begun + grace:
            if now:
                grace = None
                _end(state)
            else:
                say(f"it did not end within {grace:g} s and is being ended now")
                now, grace, begun = True, _NOW_S, time_
                _write(state.paths, now=True)
        if time_ > asked + _ASK_S:
            asked = time_
            if status.status(state.path).kind not in ("ended", "queued"):
                gone = False
            elif gone and result_of(state.paths) is None:
                return f"it ended without a result; dray why {state.path} shows more\nrun folder: {state.path}"
            else:  # on a shared disk the result may appear after Slurm shows the job's end
                gone = True
    return summary(result, state.paths)


def _grace(paths: RunPaths) -> float | None:
    """The plan's grace for a command; None for dray's trainer, which ends by itself after its checkpoint."""
    with suppress(DrayError, OSError):  # without a readable plan, do not end a run that may be saving
        plan = read(paths)
        return float(plan.grace_s) if plan.recipe.train is None else None
    return None


def _before(paths: RunPaths) -> str:
    """What is saved of a run whose job waits for the next attempt."""
    name = f"{paths.run.name}, attempt {paths.attempt}"
    if found := result_of(paths):
        ended = f"{found.status}{f', after step {found.steps}' if found.steps else ''}"
        return "\n".join([f"{name} ended before: {ended}", *left(found, next_command(paths))])
    folder = paths.checkpoints
    with suppress(DrayError, OSError):
        folder = Path(read(paths).recipe.checkpoint.folder or folder)
    saved = newest_checkpoint(folder)
    step = f"all up to step {saved.name.rpartition('-')[2]}, in {saved}" if saved else f"no checkpoint in {folder}"
    return f"{name} left no result\n  safe:   {step}"


def _ended(state: State) -> str:
    if state.paths is None:
        return f"the job is no longer in the queue; the run never started\nrun folder: {state.path}"
    found = result_of(state.paths)
    end = summary(found, state.paths) if found else f"it left no result; dray why {state.path} shows more"
    return f"{state.path.name} has already ended\n{end}"
