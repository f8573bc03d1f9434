"""The state of a run, as decided by runs/live.py, with details from its files. Read only."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from dray.contract import run_folder, scratch
from dray.contract.control_characters import printable
from dray.runs import live, metrics, stages, startup
from dray.runs.live import Left
from dray.runs.metrics import Rare
from dray.runs.named import id_of
from dray.runs.paths import attempts, last_attempt
from dray.runs.reading import Table, dig, reason, table, written
from dray.runs.reasons import meaning
from dray.runs.squeue import Job, Queue
from dray.runs.stages import Live
from dray.runs.state import DONE, FAILED, LOST, NO_RESULT, QUEUED, RUNNING, STOPPED, State, Waiting
from dray.runs.stop import TERM, Stop, asked, of_files, utc

FRESH_S = 120.0
"""A run whose files changed within this time is alive: the trainer touches its lease every 10 s, and NFS caches a
file's time for up to a minute."""
_KILLED_S = 45.0
"""The same for a run whose job got SIGTERM: Slurm kills it after KillWait, 30 s by default."""
_ASK_S, _NEXT_S, _UNKNOWN_S = 15.0, 45.0, 600.0
_ALLOCATION = ("", "(null)")
_WIDE = 400
Read = dict[Path, Rare]


def look(
    run: Path, queue: Queue, *, closely: bool = False, read: Read | None = None, numbers: list[int] | None = None
) -> State:
    """The state of a run or of one attempt, by its folder. `read` caches metrics between calls; `numbers` are the
    attempts, if known."""
    run = run.absolute()
    numbers = attempts(run) if numbers is None else numbers
    if not numbers and not (run / run_folder.JOB).exists():
        paths = last_attempt(run)
        return _made(_Attempt(paths.run, paths.attempt, attempts(paths.run)).fields(queue, read, closely=closely))
    left = _Attempt(run, max(numbers, default=0), numbers)
    return _made(left.fields(queue, read, closely=closely) if numbers else _queued(left, queue))


def _made(fields: Table) -> State:
    return State.model_validate(printable(fields))


class Watched:
    """A run that is watched over several attempts."""

    def __init__(self, run: Path) -> None:
        self.run, self._queue = run, Queue()
        self._asked = time.monotonic()
        self._read: Read = {}
        self._ended: float | None = None
        self._unknown: float | None = None

    def look(self, *, closely: bool = False) -> State:
        """The current state; asks Slurm at most four times a minute, and reads each metrics line once."""
        if time.monotonic() > self._asked + _ASK_S:
            self._queue, self._asked = Queue(), time.monotonic()
        return look(self.run, self._queue, closely=closely, read=self._read)

    def over(self, seen: State) -> bool:
        """Whether the run is over; the next attempt may enter the queue some seconds after the previous one."""
        if seen.state == NO_RESULT:  # unknown: a compiler may be silent for some minutes
            self._unknown = self._unknown or time.monotonic()
            return time.monotonic() > self._unknown + _UNKNOWN_S
        self._unknown = None
        if seen.state in (QUEUED, RUNNING):
            self._ended = None
            return False
        self._ended = self._ended or time.monotonic()
        return not seen.goes_on or self._queue.is_absent or time.monotonic() > self._ended + _NEXT_S


def _queued(left: Left, queue: Queue) -> Table:
    """The state of a submitted run before its first attempt."""
    fields: Table = {"run": left.run.name, "folder": str(left.run), "warnings": left.warnings, "state": NO_RESULT}
    if left.submitted is None:
        file = left.run / run_folder.JOB
        if table(file, left.warnings) is not None:
            left.warnings.append(f"{file} names no job")
        return fields
    job, names = left.submitted.id, [word[11:] for word in left.submitted.argv if word.startswith("--job-name=")]
    fields |= {"recipe": names[0][:_WIDE] if names else None, "job": left.submitted.job, "job_id": str(job)}
    fields["started"] = _utc(left.submitted.time)
    decided = live.decide(left, queue)
    if decided.kind == "queued" and decided.job:
        return fields | {"state": QUEUED, "waiting": _waiting(decided.job)}
    if decided.kind == "ended":
        why = f"job {job} ended before its first attempt: see its output, job-{job}.log"
        if left.cancelled:
            why = f"dray stop cancelled job {job} in the queue; the run never started"
        return fields | {"state": STOPPED if left.cancelled else LOST, "why": why}
    if decided.kind == "unknown":
        why = f"this machine has no Slurm, so it cannot tell whether job {job} waits, runs or has ended"
        return fields | ({"why": why} if queue.is_absent else {"state": QUEUED})
    return fields | {"state": RUNNING, "live": Live(stage="the job is planning the run")}


class _Attempt(Left):
    """One attempt and its files."""

    def fields(self, queue: Queue, read: Read | None, *, closely: bool) -> Table:
        """All fields of the state."""
        state, job = self._state(queue)
        plan = self.plan
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
            "job_id": job.id if job else str(id_of(self.folder) or "") or None if closely else None,
            "attempt": self.number,
            "attempts": len(self.numbers),
            "nodes": names,
            "ranks": metrics.whole(dig(plan, "world") or {}, "size"),
            "started": _utc(first),
            "attempt_started": _utc(self.began),
            "steps": metrics.whole(dig(plan, "recipe", "train") or {}, "steps"),
            "waiting": _waiting(job) if job and state == QUEUED else None,
            "warnings": self.warnings,
        }
        if result:
            found["goes_on"] = self.goes_on
            found["live"] = Live(stage="the job is planning the next attempt") if state == RUNNING else None
            return found | _ended(result, closely=closely)
        if state == STOPPED and self._cancelled:
            found |= {"why": self._cancelled.reason, "finished": self._cancelled.at}
        if closely and state != QUEUED:
            found["startup"] = startup.read(self.paths, names, self._waited(job))
        return found | self._reached(state, read, closely=closely)

    def _waited(self, job: Job | None) -> float | None:
        """Seconds in the queue by Slurm's clock; only for the first attempt, since later ones may share the job."""
        first = self.number == 1 and job is not None and job.command not in _ALLOCATION
        return job.start - job.submitted if first and job and job.start and job.submitted else None

    def _status(self) -> str | None:
        """The status in the result; None without one."""
        status = (self.result or {}).get("status")
        return status if isinstance(status, str) else None

    def _ended(self) -> str:
        return status if (status := self._status()) in (DONE, FAILED, STOPPED) and status else NO_RESULT

    def _state(self, queue: Queue) -> tuple[str, Job | None]:
        """The state's name, and the job that has the run."""
        if self.number < max(self.numbers, default=0):  # Slurm's job belongs to a later attempt
            return (self._ended() if self.ended else self._lost()), None
        decided = live.decide(self, queue)
        job, ended, kind = decided.job, self.ended, decided.kind
        if kind == "queued":
            return QUEUED, job
        if job and kind == "starting" and ended and job.number == self.job and not dig(self.result, "next", "spare"):
            return (RUNNING if (job.start or 0.0) > ended else self._ended()), job  # the job is being requeued
        if (job and job.command not in _ALLOCATION) or kind == "starting" or decided.process:
            return RUNNING, job
        if ended:
            return (QUEUED if kind == "unknown" and self.queued and not queue.is_absent else self._ended()), None
        return (self._lost() if kind == "ended" else self._by_files()), job  # an salloc allocation outlives its runs

    @cached_property
    def _cancelled(self) -> Stop | None:
        """What ended the attempt before it could write a result."""
        if told := of_files(self.paths.folder, self.job, self.began or 0.0):
            return told
        reasons = {run_folder.BY_USER: run_folder.BY_USER, "TERM": TERM}
        known = [reasons[one] for one in self._asked if one in reasons]
        return Stop(known[-1], utc(written(self.paths.stop) or 0.0)) if known else None

    @cached_property
    def _asked(self) -> list[str]:
        """Who asked the attempt to end."""
        return asked(self.paths.folder)

    def _lost(self) -> str:
        """The state of an attempt that is gone: stopped if somebody asked for it, else lost."""
        return STOPPED if self._cancelled and self._cancelled.by_wish else LOST

    def _by_files(self) -> str:
        held = scratch.held(self.plan.get("scratch"))
        if held is not None:
            return RUNNING if held else self._lost()
        if of_files(self.paths.folder, self.job, self.began or 0.0):
            return self._lost()
        folder = dig(self.plan, "recipe", "checkpoint", "folder")
        checkpoints = Path(folder) if isinstance(folder, str) and folder else self.paths.checkpoints
        places = (self.paths.metrics, checkpoints / "lease.json", self.paths.node_log(0), self.paths.rank_log(0))
        newest = max(filter(None, map(written, (*places, self.paths.plan))), default=0.0)
        fresh = _KILLED_S if "TERM" in self._asked else FRESH_S
        if newest > time.time() - fresh:
            return RUNNING
        return STOPPED if "TERM" in self._asked else NO_RESULT

    def _reached(self, state: str, read: Read | None, *, closely: bool) -> Table:
        """Progress from the metrics of an attempt without a result."""
        file, step = f"{self.folder}/{run_folder.METRICS}", metrics.Event()
        steps = metrics.whole(dig(self.plan, "recipe", "train") or {}, "steps")
        try:
            step = metrics.last_step(file)
            steps = steps or metrics.whole(metrics.first(file) if step else {}, "steps")
        except OSError as wrong:
            self.warnings.append(f"{file} cannot be read: {reason(wrong)}")
        found: Table = {"step": metrics.whole(step, "step")}
        found |= {name: metrics.number(step, name) for name in ("loss", "tokens_per_s")}
        at, left = metrics.number(step, "time"), metrics.number(step, "seconds_left")
        if at is not None and left is not None and state == RUNNING:
            found["left_s"] = round(max(0.0, left - max(0.0, time.time() - at)), 1)
        found["steps"] = steps
        if closely and state != QUEUED:
            rare = ({} if read is None else read).setdefault(self.paths.metrics, Rare(self.paths.metrics))
            found["live"] = stages.live(self.paths, self.plan, rare)
        return found


def _ended(result: Table, *, closely: bool) -> Table:
    cause = dig(result, "cause", "why")
    why = cause.partition("\n")[0] if isinstance(cause, str) else result.get("reason")
    found: Table = {
        "finished": _text(result.get("finished")),
        "step": metrics.whole(result, "steps"),
        "loss": metrics.number(result, "loss_last"),
        "tokens_per_s": metrics.number(result, "tokens_per_s"),
        "exit_code": metrics.whole(result, "exit_code"),
        "why": _text(why),
        "spent": result.get("spent"),
    }
    found |= {"startup": result.get("startup")} if closely else {}
    return found | ({"warnings": [str(one)[:_WIDE] for one in _list(result.get("warnings"))]} if closely else {})


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
