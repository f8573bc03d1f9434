"""How a run ended: make result.json from the files of nodes and ranks, even if they are damaged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from dray.contract import exit_codes, files, run_folder
from dray.contract.control_characters import printable
from dray.planning import grace
from dray.planning.schema import Plan
from dray.runs import capsule, causes, cost, process_group, records, requeue, startup, stop
from dray.runs.cost import Cost
from dray.runs.metrics import WARNED_OF, Event, Metrics, number, result_warnings, whole
from dray.runs.result import Cause, Recovery, Result, SlowRank, history
from dray.runs.status import write_summary
from dray.runs.stop import Stop, utc
from dray.runs.store import RunPaths, newest_checkpoint, plan_of, read_json, reason, written

_FULL = 1 << 16
"""A disk with fewer free bytes is full."""
T = TypeVar("T")


def finish(
    paths: RunPaths, *, code: int, stopped: Stop | None = None, batch: bool = False, known: str = "",
    spent: Cost | None = None,
) -> Result:  # fmt: skip
    """Write result.json. `code` is the exit code of starting the nodes; the first cause's code wins over it.

    Also decide what comes next: a `batch` job can be requeued. `known` is what Slurm and the job's script tell;
    `spent` is the cost of a run without a job.

    It never fails: a file that cannot be read is a warning, and a result that cannot be written is printed.
    """
    ended = _Ended(paths, code, stopped)
    result = ended.result(known, spent)
    plan, then = ended.plan, None
    if plan and not ended.by_user:
        then = requeue.decide(result, plan, batch=batch)
    warnings = [*ended.warnings, *_short_grace(result, ended.stopped)]
    result = result.model_copy(update={"next": then, "warnings": warnings})
    result = Result.model_validate(printable(result.model_dump()))  # other people's programs wrote its texts
    text = result.model_dump_json(indent=1) + "\n"
    try:
        files.write_atomic(paths.result, text)
        write_summary(paths)
    except OSError as error:
        with suppress(OSError, ValueError):
            problem = f"dray: {paths.result} cannot be written: {error.strerror}. Its content is:"
            print(problem, text, sep="\n", file=sys.stderr)
        return result
    if wrong := capsule.ended(paths, plan, result):
        result.warnings.append(wrong)
    if result.status == "done":
        with suppress(OSError):
            _tidy(paths)
    if then and (then.requeue or then.spare):
        line = f"{'spare' if then.spare else 'requeue'} {' '.join(then.exclude)}\n"
        with suppress(OSError):  # the job then stays out of the queue
            files.write_atomic(paths.next, line)
    return result


def _tidy(paths: RunPaths) -> None:
    """Remove files that a good run does not need: the preflight's rank files, and an empty log of srun."""
    for left in paths.preflight.glob("rank-*"):
        left.unlink()
    log = paths.logs / records.SRUN_LOG
    if log.exists() and not log.stat().st_size:
        log.unlink()


class Failure(NamedTuple):
    """A failure, and what followed it."""

    time: float
    ended: float
    """When all ranks had ended."""
    cause: Cause | None
    queue_s: float = 0.0
    """Seconds until Slurm started the next attempt."""


class _Ended:
    """An attempt that has ended. A file that cannot be read is a warning, and does not hide another."""

    def __init__(self, paths: RunPaths, code: int, stopped: Stop | None) -> None:
        self.paths, self.metrics = paths, Metrics(paths.metrics)
        self.warnings: list[str] = []
        self.plan = self.tried(paths.plan, plan_of, paths)
        # srun may report a failed node that it killed while the node was ending.
        self.code = exit_codes.RETRY if code and paths.saved.is_file() else code
        requests = stop.asked(paths.folder)
        self.by_user = run_folder.BY_USER in requests
        followed = self.code == exit_codes.RETRY or (self.code and run_folder.NOW in requests)
        if requests and (self.by_user if stopped else followed):  # the user wants it to end, whatever else ends it too
            stopped = Stop(run_folder.BY_USER if self.by_user else "a request", utc(written(paths.stop)))
        self.stopped = stopped

    def tried(self, file: Path, look: Callable[..., T], *arguments: object, **named: object) -> T | None:
        """What `look` returns for these arguments; if it fails, None and a warning that names the file."""
        try:
            return look(*arguments, **named)
        except Exception as error:  # the result is printed whatever is in the run folder
            self.warnings.append(f"{file} cannot be read: {reason(error)}")
            return None

    def result(self, known: str, spent: Cost | None) -> Result:
        """The result, without what comes next and without warnings."""
        paths, plan, stopped = self.paths, self.plan, self.stopped
        fields: dict[str, Any] = {"run": paths.run.name, "world_size": None, "hosts": []}
        if plan:
            hosts = [node.name for node in plan.world.nodes]
            fields |= {"run": plan.run, "world_size": plan.world.size, "hosts": hosts}
            fields |= {"command": plan.recipe.train is None, "grace_s": plan.grace_s if plan.by_slurm else None}
            spent = spent or cost.parse(known)
            if alone := self.tried(paths.process_group, process_group.warning, paths, plan):
                self.warnings.append(alone)
        if stopped:
            fields |= {"reason": stopped.reason, "at": stopped.at}
            if stopped.left_s is not None:
                fields["grace_s"] = stopped.left_s
        checkpoint = self.checkpoint()
        saved = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
        figures = self.tried(paths.metrics, self.figures, saved) or {}
        cause = None  # stopped ranks may die in any way; none of them is the cause
        if self.code and not stopped:
            cause = self.failure(paths.failures).cause or self.unrecorded()
        elif plan and not stopped:
            cause = self.missing(plan, ended=figures.get("train_seconds") is not None)
        status = "stopped" if stopped else "failed" if cause else "done"
        if status == "done":
            figures.pop("lost_s", None)
        elif checkpoint:
            fields |= {"checkpoint": str(checkpoint), "saved_step": saved}
        folders = [folder for folder in paths.failures.glob("restart-*/") if folder.name[8:].isdecimal()]
        restarts = [self.failure(folder) for folder in sorted(folders, key=lambda folder: int(folder.name[8:]))]
        attempts = self.tried(paths.run, history, paths) or []
        costs = [(attempt.attempt, attempt.cost) for attempt in attempts]
        unfit = ",".join(files.tail(paths.failing_nodes)).split(",")
        return Result(
            status=status,
            exit_code=cause.code if cause else self.code,
            finished=utc(),
            cause=explained(cause, paths.logs, plan),
            failing_nodes=[host for host in fields["hosts"] if host in unfit],
            restarts=len(restarts),
            restart_cause=explained(restarts[0].cause, paths.logs, plan) if restarts else None,
            preflight=self.tried(paths.preflight_report, self.preflight),
            recoveries=self.tried(paths.metrics, self.recoveries, restarts) or [],
            history=attempts,
            startup=self.tried(paths.startup, startup.read, paths, fields["hosts"], cost.queue_s(known)),
            cost=spent,
            spent=cost.spent([*costs, (paths.attempt, spent)]),
            **fields,
            **figures,
        )

    def failure(self, folder: Path, ended: float | None = None) -> Failure:
        """The failure with the earliest record in the folder, which changes last when all ranks have `ended`."""
        ended = ended or written(folder) or 0.0
        warn, logs = self.warnings.append, self.paths.logs
        found = self.tried(folder, records.read, folder, logs, warn=warn)
        return Failure(found[0].time, ended, found[0].cause) if found else Failure(ended, ended, None)

    def unrecorded(self) -> Cause:
        """The cause of a failure that nobody recorded."""
        folder, logs, code = self.paths.folder, self.paths.logs, self.code
        why = "no rank left a record: the node, the container or the launcher failed, or the job was stopped"
        if not folder.exists():
            why = f"the folder of the attempt is gone: {folder}"
        elif (disk := self.tried(folder, os.statvfs, folder)) and disk.f_bavail * disk.f_frsize < _FULL:
            code, why = exit_codes.UNFIT, f"the disk is full, so logs and records are incomplete: {folder}"
        lines = [line for log in sorted(logs.glob("node-*.log")) for line in files.tail(log)]
        return Cause(node="", rank=None, code=code, why=why, log=str(logs), last_lines=lines[-20:])

    def missing(self, plan: Plan, *, ended: bool) -> Cause | None:
        """Rank 0 as the cause, if training ended with exit code 0 but without its last metrics line or its model."""
        log, final = self.paths.rank_log(0), self.paths.final_model
        here = plan.world.shared_folder or log.exists()  # else another machine has the files
        if plan.recipe.train is None or not here:
            return None
        missing = [] if ended else [f"no `end` in {self.paths.metrics.name}"]
        if plan.recipe.checkpoint.final and not (final / "config.json").is_file():
            missing.append(f"no model in {final}")
        if not missing:
            return None
        name, why = plan.world.nodes[0].name, f"it ended with exit code 0 but left {' and '.join(missing)}"
        return Cause(node=name, rank=0, code=exit_codes.FAILED, why=why, log=str(log), last_lines=files.tail(log))

    def checkpoint(self) -> Path | None:
        """The newest checkpoint in the plan's folder, or in the run's own."""
        folder = Path((self.plan.recipe.checkpoint.folder if self.plan else "") or self.paths.checkpoints)
        return self.tried(folder, newest_checkpoint, folder)

    def preflight(self) -> str | None:
        """The preflight's result in one line."""
        report = read_json(self.paths.preflight_report, self.warnings)
        if report is None:
            return None
        transports = " and ".join(sorted({rank["transport"] for rank in report["ranks"]}))
        best = max((row["bus_gb_s"] for row in report["sweep"]), default=0.0)
        slow = sorted({rank["warning"] for rank in report["ranks"] if "warning" in rank})
        slow += [f"slow: {link}" for link in report.get("slow_links", ())]
        seconds = sum(report["seconds"].values())
        return "; ".join([f"{transports}, {best:.2f} GB/s of bus bandwidth, in {seconds:.1f} s", *slow])

    def figures(self, saved: int) -> dict[str, Any]:
        """Steps, losses and speed from the metrics, and the seconds of training after step `saved`."""
        first: dict[str, Event] = {}
        last: dict[str, Event] = {}
        slow: list[SlowRank] = []
        noticed: list[Event] = []
        kept = time = None
        for event in self.metrics:
            kind, step = str(event.get("event")), whole(event, "step")
            if kind in WARNED_OF:
                noticed.append(event)
                continue  # a checkpoint may be complete long after the last step
            if kind == "step" and step is None:
                continue
            if kind == "slow":
                with suppress(ValidationError):  # a damaged line does not hide the other lines
                    slow.append(SlowRank.model_validate(event))
            first.setdefault(kind, event)
            last[kind] = event
            time = number(event, "time") or time
            if kept is None or (kind == "step" and (step or 0) <= saved):
                kept = time
        self.warnings += [*self.metrics.warnings(), *result_warnings(noticed)]
        start, final, end = (last.get(kind, {}) for kind in ("start", "step", "end"))
        begin, steps = whole(start, "first_step"), whole(final, "step")
        if steps is None and begin == whole(start, "steps"):  # nothing was left to do
            steps = begin
        return {
            "first_step": begin,
            "steps": steps,
            "loss_first": number(first.get("step"), "loss"),
            "loss_last": number(final, "loss"),
            "perplexity": number(last.get("eval"), "perplexity"),
            "tokens_per_s": number(end, "tokens_per_s"),
            "train_seconds": number(end, "train_seconds"),
            "sample": str(end["sample"]) if end.get("sample") else None,
            "slow_ranks": slow,
            "save_s": max(filter(None, (number(event, "seconds") for event in noticed)), default=None),
            "lost_s": round(max(0.0, time - kept), 3) if time and kept else None,
        }

    def recoveries(self, restarts: list[Failure]) -> list[Recovery]:
        """The recoveries from the end of the previous attempt and from each restart."""
        before = RunPaths(self.paths.run, self.paths.attempt - 1)
        ended = written(before.result)
        if ended is None:
            return recoveries(restarts, self.metrics)
        queue_s = (written(self.paths.plan) or ended) - ended
        failed = self.failure(before.failures, ended)._replace(queue_s=queue_s)
        return recoveries([failed, *restarts], chain(Metrics(before.metrics), self.metrics))


def explained(cause: Cause | None, logs: Path, plan: Plan | None) -> Cause | None:
    """The cause with its name from causes.toml, if one fits; Slurm's own lines count as evidence."""
    if cause is None:
        return None
    cause = cause.model_copy(update={"evidence": [*cause.evidence, *records.by_slurm(logs)]})
    return records.redacted(causes.explained(cause), plan)


def recoveries(failures: Iterable[Failure], events: Iterable[Event]) -> list[Recovery]:
    """The recoveries after failures (in time order), from the attempts' metrics; only if a step followed."""
    waiting, found = list(failures), []
    failure = start = last = None
    for event in events:
        kind, time = event.get("event"), number(event, "time")
        if kind == "start":
            while waiting and time and waiting[0].time < time:  # of failures in a row, the last one counts
                failure, start = waiting.pop(0), event
        elif kind == "step" and time:
            if failure and start:
                found.append(_recovery(failure, start, event, last))
                failure = None
            last = time
    return found


def _recovery(failure: Failure, start: Event, step: Event, last: float | None) -> Recovery:
    load, started = number(start, "load_s") or 0.0, number(start, "time") or 0.0
    times = {
        "detect_s": failure.time - (failure.time if last is None else last),
        "stop_s": failure.ended - failure.time,
        "queue_s": failure.queue_s,
        "start_s": started - failure.ended - failure.queue_s - load,
        "load_s": load,
        "step_s": step["time"] - started,
    }
    times = {name: round(max(0.0, seconds), 3) for name, seconds in times.items()}
    return Recovery(why=failure.cause.why if failure.cause else "the job ended", step=whole(step, "step") or 0, **times)


def _short_grace(result: Result, stopped: Stop | None) -> list[str]:
    """A warning if the grace was too short, or is shorter than twice the slowest checkpoint."""
    given, save = result.grace_s, result.save_s
    if given is None or result.command:
        return []
    took, enough = "no checkpoint was completed", 1
    if save is not None:
        took, enough = f"the slowest checkpoint took {save:.1f} s", grace.wanted(save)
    wrong = "is shorter than twice the slowest checkpoint"
    told = stopped is not None and stopped.left_s is not None and stopped.reason == stop.TIME_LIMIT
    if told and result.exit_code != exit_codes.RETRY:
        wrong, enough = "before the time limit was too short", max(enough, 2 * round(given))
    if given >= enough:
        return []
    fix = f"set grace_s={enough} with dray submit, or --signal=B:USR1@{enough} with sbatch"
    return [f"the grace of {given:.0f} s {wrong}: {took}; {fix}"]
