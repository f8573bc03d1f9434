"""Ask a run to save and end; it does not go back into the queue then."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.runs import live, squeue
from dray.runs.live import State
from dray.runs.named import find, newest_first
from dray.runs.paths import RunPaths, newest_checkpoint
from dray.runs.result import left, next_command, result_of, summary
from dray.runs.write import read

Say = Callable[[str], None]
_LOOK_S = 0.3
_NOW_S = 15.0  # for the runners to end their ranks: their grace, and what SIGKILL needs
_ASK_S = 10.0  # between questions to Slurm's controller, which all users share
_TRIES = 3
_GOES_ON = ("queued", "starting", "running")
_SHOWN = 6


def newest(runs: Path | None) -> Path:
    """The newest run, unless several of this user's go on: then no one of them is meant."""
    found = find("", runs)
    queue, going = squeue.Queue(), dict[Path, str]()
    for run in newest_first(found.parent):
        with suppress(OSError):
            if run.stat().st_uid == os.geteuid() and live.look(run, queue).kind in _GOES_ON:
                going.setdefault(run.resolve(), run.name)
    if len(going) > 1:
        names = [*going.values()]
        raise ConfigError(
            "several runs go on",
            where=found.parent,
            wanted="the name of one",
            found=", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN),
            fix=f"dray stop {names[0]}",
        )
    return found


def stop(run: Path, *, now: bool, wait: bool, say: Say) -> None:
    """Ask it, or end it `now`; wait until it has ended, and say its last words."""
    told = ""
    for _ in range(_TRIES):
        state = live.look(run)
        if state.kind == "ended":
            say(_ended(state))
            return
        if state.kind == "queued":
            assert state.job
            if state.paths and not told:
                say(told := _before(state.paths))
            squeue.cancel(state.job, state.cluster, waiting=True)
            if state.job.id not in {job.id for job in squeue.jobs(state.cluster)}:
                _note(state)
                none = "" if state.paths else "; nothing has run"
                say(f"its job waited in the queue, and was cancelled{none}\nrun folder: {run}")
                return
            continue  # it has begun in the meantime
        break
    else:
        raise DrayError("the job is still in the queue", where=state.where, fix="squeue --me shows it; scancel JOB")
    if state.kind == "starting":
        assert state.job
        if state.paths:  # between two attempts, which may be in an allocation
            _require_batch(state, state.job)
        squeue.cancel(state.job, state.cluster)
        _note(state)
        say(f"the job had not begun to train, and was cancelled: {state.where}\nrun folder: {run}")
        return
    if state.paths is None or (state.kind == "unknown" and state.paths.result.exists()):
        raise UnfitError(
            "whether its job has begun is not known here",
            where=run,
            found=state.why,
            fix="dray stop again, once squeue lists the job here",
        )
    _write(state.paths, now=now and wait)
    _say_asked(state, say, now=now)
    if wait:
        say(_last_words(state, say, now=now))
    elif now:
        _end(state)


def _note(state: State) -> None:
    """A run without an attempt has no result that could tell: job.json does."""
    queued = None if state.paths else live.Left(state.run, 0, []).submitted
    if queued:
        told = queued.model_copy(update={"stopped": time.time()})
        with suppress(OSError):  # it is cancelled all the same
            files.write_atomic(state.run / run_folder.JOB, told.model_dump_json(indent=1))


def _say_asked(state: State, say: Say, *, now: bool) -> None:
    assert state.paths
    how = "is ended now" if now else "was asked to save and end"
    say(f"{state.run.name}, attempt {state.paths.attempt} {how}: {state.where}")
    if not now and (grace := _grace(state.paths)) is not None:
        ended = f"what still runs in {grace:g} s is ended"
        say(f"its program gets SIGUSR1 to save and end by; while dray stop waits, {ended}")
    if state.kind == "unknown" and not now:
        say("whether it still goes on is not known here; dray stop --no-wait does not wait for it")


def _write(paths: RunPaths, *, now: bool) -> None:
    """The runner of the first node reads it each second. `now` it ends the ranks, while the image is mounted."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(paths.stop, flags, 0o600)
    except OSError as refused:
        raise ConfigError(
            "the run cannot be asked", where=paths.stop, wanted="a file that you may write", found=refused.strerror,
            fix="mend the folder, or end its job with scancel",
        ) from refused  # fmt: skip
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ConfigError("the run cannot be asked", where=paths.stop, wanted="a file", found="something else")
        lines = [run_folder.BY_USER, run_folder.NOW] if now else [run_folder.BY_USER]
        os.write(handle, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(handle)


def _end(state: State) -> None:
    """At once: SIGTERM, after which the trainer saves if KillWait leaves it the time."""
    if state.process:
        with suppress(ProcessLookupError):
            os.kill(state.process, signal.SIGTERM)
    elif state.job is None:
        raise UnfitError("it cannot be ended from here", found=state.why, fix="dray stop there, or without --now")
    else:
        _require_batch(state, state.job)
        squeue.cancel(state.job, state.cluster)


def _require_batch(state: State, job: squeue.Job) -> None:
    if not squeue.of_batch(job):
        raise ConfigError(
            "the run is in an allocation of yours, which would end with it",
            where=state.where,
            fix="press Ctrl-C where it was started; scancel ends the whole allocation",
        )


def _last_words(state: State, say: Say, *, now: bool) -> str:
    """Once it has ended. What takes no notice of SIGUSR1, as a command may, is ended after the plan's grace.

    Slurm ends the job of a run that its runners do not end `now`.
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
                say(f"it has not ended in {grace:g} s, and is ended now")
                now, grace, begun = True, _NOW_S, time_
                _write(state.paths, now=True)
        if time_ > asked + _ASK_S:
            asked = time_
            if live.look(state.run).kind not in ("ended", "queued"):
                gone = False
            elif gone and result_of(state.paths) is None:
                return f"it has ended, and left no result; dray why {state.run} shows more\nrun folder: {state.run}"
            else:  # a disk that machines share may show the result later than Slurm the job's end
                gone = True
    return summary(result, state.paths)


def _grace(paths: RunPaths) -> float | None:
    """None for dray's trainer, which ends by itself however long a checkpoint takes."""
    with suppress(DrayError, OSError):  # a plan that cannot be read: nothing is ended that may be saving
        plan = read(paths)
        return float(plan.grace_s) if plan.recipe.train is None else None
    return None


def _before(paths: RunPaths) -> str:
    """What is safe of the attempts of a run whose job waits for the next one."""
    name = f"{paths.run.name}, attempt {paths.attempt}"
    if found := result_of(paths):
        ended = f"{found.status}{f', after step {found.steps}' if found.steps else ''}"
        return "\n".join([f"{name} has ended before: {ended}", *left(found, next_command(paths))])
    folder = paths.checkpoints
    with suppress(DrayError, OSError):
        folder = Path(read(paths).recipe.checkpoint.folder or folder)
    saved = newest_checkpoint(folder)
    step = f"all up to step {saved.name.rpartition('-')[2]}, in {saved}" if saved else f"no checkpoint in {folder}"
    return f"{name} has left no result\n  safe:   {step}"


def _ended(state: State) -> str:
    if state.paths is None:
        return f"its job is not in the queue any more; nothing has run\nrun folder: {state.run}"
    found = result_of(state.paths)
    end = summary(found, state.paths) if found else f"it left no result; dray why {state.run} shows more"
    return f"{state.run.name} has ended already\n{end}"
