"""How a run is, decided from its own files first, then by what Slurm tells where it is there. It changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dray.contract import files, run_folder, scratch
from dray.contract.values import printable
from dray.runs import metrics, records, stages
from dray.runs.named import changed, cluster_of, id_of, jobs
from dray.runs.paths import RunPaths, attempts, last_attempt
from dray.runs.reasons import meaning
from dray.runs.result import require_version
from dray.runs.squeue import JUST_S, Job, Queue
from dray.runs.stages import Live, dig, written
from dray.runs.state import DONE, FAILED, LOST, NO_RESULT, QUEUED, RUNNING, STOPPED, State, Waiting
from dray.runs.stop import utc

FRESH_S = 120.0
"""What was written to since then is alive: the trainer touches its lease every 10 s, and NFS keeps what it knows of a
file for up to a minute."""
_ASK_S, _NEXT_S, _UNKNOWN_S = 15.0, 45.0, 600.0
_LIMIT = 4 << 20
_ALLOCATION = ("", "(null)")
_WIDE = 400
Table = dict[str, Any]


def look(run: Path, queue: Queue, *, closely: bool = False) -> State:
    """Of a run's folder, or of that of one of its attempts, whatever is in it."""
    run = run.absolute()
    numbers = attempts(run)
    if not numbers and (run / run_folder.JOB).exists():
        return _made(_queued(run, queue))
    if not numbers:
        paths = last_attempt(run)
        return _made(_Attempt(paths.run, paths.attempt, queue, attempts(paths.run)).fields(closely=closely))
    return _made(_Attempt(run, numbers[-1], queue, numbers).fields(closely=closely))


def _made(fields: Table) -> State:
    return State.model_validate(printable(fields))


class Watched:
    """A run that is looked at again and again, over its attempts."""

    def __init__(self, run: Path) -> None:
        self.run, self._queue = run, Queue()
        self._asked = time.monotonic()
        self._ended: float | None = None
        self._unknown: float | None = None

    def look(self, *, closely: bool = False) -> State:
        """Slurm is asked four times a minute at most."""
        if time.monotonic() > self._asked + _ASK_S:
            self._queue, self._asked = Queue(), time.monotonic()
        return look(self.run, self._queue, closely=closely)

    def over(self, seen: State) -> bool:
        """Whether no more will come: the next attempt may be in the queue only some seconds after the one before."""
        if seen.state == NO_RESULT:  # nobody here knows; a compiler may be silent for some minutes
            self._unknown = self._unknown or time.monotonic()
            return time.monotonic() > self._unknown + _UNKNOWN_S
        self._unknown = None
        if seen.state in (QUEUED, RUNNING):
            self._ended = None
            return False
        self._ended = self._ended or time.monotonic()
        return not seen.goes_on or not self._queue.answers or time.monotonic() > self._ended + _NEXT_S


def newest_first(runs: list[Path]) -> list[Path]:
    """As `find` takes the newest."""
    return [run for _, run in sorted(((changed(run), run) for run in runs), reverse=True)]


def _queued(run: Path, queue: Queue) -> Table:
    """Of a run that `dray submit` has made, before its job has begun an attempt."""
    warnings: list[str] = []
    queued = table(run / run_folder.JOB, warnings) or {}
    number, since = metrics.whole(queued, "job"), metrics.number(queued, "time")
    task = metrics.whole(queued, "task")
    name = number if task is None else f"{number}_{task}"
    fields = {"run": run.name, "folder": str(run), "job": number, "started": _utc(since), "warnings": warnings}
    argv = queued.get("argv")
    named = [word[11:] for word in argv if str(word).startswith("--job-name=")] if isinstance(argv, list) else []
    fields["recipe"] = str(named[0])[:_WIDE] if named else None
    if number is None:
        return fields | {"state": NO_RESULT}
    fields["job_id"] = str(name)
    job = queue.of(name, since or 0.0, [str(run)])
    if queue.is_absent:
        why = f"whether job {name} waits, runs or has ended is not known here: this machine has no Slurm"
        return fields | {"state": NO_RESULT, "why": why}
    if job is None:
        asked = queue.answers and not queued.get("cluster") and run.lstat().st_uid == os.geteuid()
        if not asked or queue.is_older(since or 0.0, margin_s=JUST_S):
            return fields | {"state": QUEUED}
        why = f"job {name} is gone and began no attempt: its output, job-{name}.log, may tell"
        return fields | {"state": LOST, "why": why}
    if job.waits:
        return fields | {"state": QUEUED, "waiting": _waiting(job)}
    return fields | {"state": RUNNING, "live": Live(stage="the job plans the run")}


class _Attempt:
    """One attempt, and what its files tell."""

    def __init__(self, run: Path, number: int, queue: Queue, numbers: list[int]) -> None:
        self.run, self.number, self.queue = run, number, queue
        self.count, self.newest = len(numbers), max(numbers, default=number)
        self.folder = f"{run}/{run_folder.attempt(number)}"  # text: a Path each would be half the time of a list
        self.warnings: list[str] = []
        self.result = self._read_result()
        self.plan = table(f"{self.folder}/{run_folder.PLAN}", self.warnings) or {}

    def _read_result(self) -> Table | None:
        return table(f"{self.folder}/{run_folder.RESULT}", self.warnings, require_version)

    @cached_property
    def paths(self) -> RunPaths:
        """All of its files, of which an attempt that has ended needs two."""
        return RunPaths(self.run, self.number)

    @cached_property
    def began(self) -> float | None:
        """When its plan was written."""
        return written(f"{self.folder}/{run_folder.PLAN}")

    def fields(self, *, closely: bool) -> Table:
        """Of the whole state."""
        plan = self.plan
        state, job = self._state()
        result = self.result if self._status() else None
        recipe = dig(plan, "recipe") or {}
        names = [str(node.get("name"))[:_WIDE] for node in _list(dig(plan, "world", "nodes")) if isinstance(node, dict)]
        first = written(f"{self.run}/{run_folder.attempt(1)}/{run_folder.PLAN}") if self.number > 1 else self.began
        found: Table = {
            "run": self.run.name,
            "folder": str(self.run),
            "state": state,
            "recipe": _text(recipe.get("name")) if isinstance(recipe, dict) else None,
            "command": bool(dig(plan, "recipe", "command")),
            "job": (job.number if job else metrics.whole(plan, "job")) or None,
            "job_id": job.id if job else str(id_of(self.paths) or "") or None if closely else None,
            "attempt": self.number,
            "attempts": self.count,
            "nodes": names,
            "ranks": metrics.whole(dig(plan, "world") or {}, "size"),
            "started": _utc(first),
            "attempt_started": _utc(self.began),
            "steps": metrics.whole(dig(plan, "recipe", "train") or {}, "steps"),
            "waiting": _waiting(job) if job and state == QUEUED else None,
            "warnings": self.warnings,
        }
        if result:
            found["goes_on"] = bool(dig(result, "next", "requeue") or dig(result, "next", "spare"))
            found["live"] = Live(stage="the job plans the next attempt") if state == RUNNING else None
            return found | _ended(result, closely=closely)
        return found | self._reached(state, closely=closely)

    def _status(self) -> str | None:
        """By the result, once there is one."""
        status = (self.result or {}).get("status")
        return status if isinstance(status, str) else None

    def _ended(self) -> str:
        return status if (status := self._status()) in (DONE, FAILED, STOPPED) and status else NO_RESULT

    def _state(self) -> tuple[str, Job | None]:
        """And the job by which the run goes on."""
        if self.number < self.newest:  # what Slurm has goes on with a later attempt
            return (self._ended() if self._status() else LOST), None
        if self._status():
            return self._after()
        number = metrics.whole(self.plan, "job") or next(iter(jobs(self.run)), None)
        if number and self.queue.answers:
            job, newer = self._job(number), self.queue.is_older(self.began or 0.0)
            if job and job.command in _ALLOCATION:  # by salloc, which outlives a run in it
                return self._by_files(), job
            if job or newer:
                return (QUEUED if job and job.waits and not newer else RUNNING), job
            if self._is_gone():
                self.result = self._read_result()  # it may have come since
                return self._after() if self._status() else (LOST, None)
        return self._by_files(), None

    def _after(self) -> tuple[str, Job | None]:
        """Of an attempt with a result, after which the run may go on."""
        result, ended = self.result, self._ended()
        ended_at = written(f"{self.folder}/{run_folder.RESULT}") or 0.0
        submitted = written(f"{self.run}/{run_folder.JOB}") or 0.0
        again = submitted > ended_at  # another job
        goes_on = ended == STOPPED or again or dig(result, "next", "requeue") or dig(result, "next", "spare")
        job = self._job(at=ended_at) if goes_on else None
        if job and job.waits:
            return QUEUED, job
        if job and (dig(result, "next", "spare") or (job.start or 0.0) > ended_at):
            return RUNNING, job
        untold = again and (not self.queue.answers or self.queue.is_older(submitted, margin_s=JUST_S))
        return (QUEUED if untold and not self.queue.is_absent else ended), job

    def _job(self, number: int | None = None, *, at: float | None = None) -> Job | None:
        folders = {str(self.run), str(self.plan.get("run_folder"))}
        number = number or metrics.whole(self.plan, "job")
        return self.queue.of(number, at or self.began or 0.0, folders)

    def _is_gone(self) -> bool:
        """Whether that Slurm does not know the job means that there is none: it knows one user's, on one cluster."""
        cluster = cluster_of(self.paths)
        return bool(cluster) and cluster == self.queue.cluster and self.run.lstat().st_uid == os.geteuid()

    def _by_files(self) -> str:
        held = scratch.held(self.plan.get("scratch"))
        if held is not None:
            return RUNNING if held else LOST
        folder = dig(self.plan, "recipe", "checkpoint", "folder")
        checkpoints = Path(folder) if isinstance(folder, str) and folder else self.paths.checkpoints
        places = (self.paths.metrics, checkpoints / "lease.json", self.paths.node_log(0), self.paths.rank_log(0))
        newest = max(filter(None, map(written, (*places, self.paths.plan))), default=0.0)
        return RUNNING if newest > time.time() - FRESH_S else NO_RESULT

    def _reached(self, state: str, *, closely: bool) -> Table:
        """By the metrics of one without a result."""
        try:
            tail = metrics.tail(self.paths.metrics)
        except OSError as wrong:
            self.warnings.append(f"{self.paths.metrics} cannot be read: {records.reason(wrong)}")
            tail = []
        step = next((event for event in reversed(tail) if event.get("event") == "step"), {})
        found: Table = {"step": metrics.whole(step, "step")}
        found |= {name: metrics.number(step, name) for name in ("loss", "tokens_per_s")}
        at, left = metrics.number(step, "time"), metrics.number(step, "seconds_left")
        if at is not None and left is not None and state == RUNNING:
            found["left_s"] = round(max(0.0, left - max(0.0, time.time() - at)), 1)
        for event in tail:
            if event.get("event") == "start" and (steps := metrics.whole(event, "steps")):
                found["steps"] = steps
        return found | ({"live": stages.live(self.paths, self.plan, tail)} if closely and state != QUEUED else {})


def _ended(result: Table, *, closely: bool) -> Table:
    cause = dig(result, "cause", "why")
    why = cause.partition("\n")[0] if isinstance(cause, str) else result.get("reason")
    found = {
        "finished": _text(result.get("finished")),
        "step": metrics.whole(result, "steps"),
        "loss": metrics.number(result, "loss_last"),
        "tokens_per_s": metrics.number(result, "tokens_per_s"),
        "exit_code": metrics.whole(result, "exit_code"),
        "why": _text(why),
    }
    return found | ({"warnings": [str(one)[:_WIDE] for one in _list(result.get("warnings"))]} if closely else {})


def table(
    path: Path | str, warnings: list[str], check: Callable[[object, Path | str], None] = lambda *_: None
) -> Table | None:
    """A file's JSON object; None where there is none, and a warning where it cannot be read."""
    try:
        found = from_json(files.read(path, limit=_LIMIT))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        check(found, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.append(f"{path} cannot be read: {records.reason(error)}")
        return None
    return found


def _waiting(job: Job) -> Waiting:
    return Waiting(
        job=job.number,
        id=job.id,
        state=job.state,
        reason=job.reason,
        meaning=meaning(job.reason),
        start=_utc(job.start),
    )


def _utc(seconds: float | None) -> str | None:
    with suppress(OverflowError, ValueError, OSError):
        return None if seconds is None else utc(seconds)
    return None


def _text(value: object) -> str | None:
    return value[:_WIDE] if isinstance(value, str) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
