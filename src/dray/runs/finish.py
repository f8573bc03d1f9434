"""How a run ended: make result.json from the files of nodes and ranks, even if they are damaged."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dray.contract import exit_codes, files, run_folder
from dray.contract.control_characters import printable
from dray.planning.schema import Plan
from dray.runs import capsule, causes, cost, failure_records, requeue, startup, stop_reason, world_size_check
from dray.runs.cost import Cost
from dray.runs.metrics import WARNED_OF, Event, Metrics, number, result_warnings, whole
from dray.runs.result import Cause, Result, history
from dray.runs.status import write_summary
from dray.runs.stop_reason import Stop, utc
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
    if code:
        with suppress(OSError):
            failure_records.write_blind(paths)
    ended = Ended(paths, code, stopped)
    result = ended.result(known, spent)
    plan, then = ended.plan, None
    if plan and not ended.by_user:
        then = requeue.decide(result, plan, batch=batch)
    result = result.model_copy(update={"next": then, "warnings": ended.warnings})
    result = Result.model_validate(printable(result.model_dump()))  # other people's programs wrote its texts
    text = result.model_dump_json(indent=1) + "\n"
    try:
        files.write_atomic(paths.result, text)
    except OSError as error:
        with suppress(OSError, ValueError):
            problem = f"dray: {paths.result} cannot be written: {error.strerror}. Its content is:"
            print(problem, text, sep="\n", file=sys.stderr)
        return result
    if wrong := capsule.ended(paths, plan, result):
        result.warnings.append(wrong)
    with suppress(OSError):
        if result.status == "done":  # then nobody needs what each rank wrote in the preflight
            for file in paths.preflight.glob("rank-*"):
                file.unlink()
        if then and (then.requeue or then.spare):  # without the file the job stays out of the queue
            lines = [f"{'spare' if then.spare else 'requeue'} {' '.join(then.exclude)}"]
            if plan and then.requeue:
                lines += requeue.options(known, plan, then.exclude)
            files.write_atomic(paths.next, "".join(f"{line}\n" for line in lines))
    ended.tried(paths.run, write_summary, paths)  # last: without it a list reads the other files
    return result


class Ended:
    """An attempt that has ended. A file that cannot be read is a warning, and does not hide another."""

    def __init__(self, paths: RunPaths, code: int, stopped: Stop | None = None) -> None:
        self.paths, self.metrics = paths, Metrics(paths.metrics)
        self.warnings: list[str] = []
        self.plan = self.tried(paths.plan, plan_of, paths)
        self.first = self.recorded(paths.failures) if code else None
        # srun may report a node that it killed while the node was ending, or a rank that lost the one that ended first.
        has_ended = paths.saved.is_file() or (not stopped and self.first and self.first.code == exit_codes.RETRY)
        self.code = exit_codes.RETRY if code and has_ended else code
        requests = stop_reason.asked(paths.folder)
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
            fields |= {"world_size": plan.world.size, "hosts": hosts}
            fields["command"] = plan.recipe.train is None
            spent = spent or cost.parse(known)
            if alone := self.tried(paths.process_group, world_size_check.warning, paths, plan):
                self.warnings.append(alone)
        if stopped:
            fields |= {"reason": stopped.reason, "at": stopped.at}
        figures = self.tried(paths.metrics, self.figures) or {}
        cause = None  # stopped ranks may die in any way; none of them is the cause
        if self.code and not stopped:
            cause = self.first or self.unrecorded()
        elif plan and not stopped and figures.get("train_seconds") is None:
            cause = self.without_end(plan)
        cause = explained(cause, paths.logs, plan)  # which may find that another attempt would succeed
        status = "stopped" if stopped else "failed" if cause else "done"
        checkpoint = None if status == "done" else self.checkpoint()
        if checkpoint:
            fields |= {"checkpoint": str(checkpoint), "saved_step": int(checkpoint.name.rpartition("-")[2])}
        restarts = sorted(paths.failures.glob("restart-*/"))
        earlier = self.tried(paths.run, history, paths) or []
        unfit = ",".join(files.tail(paths.failing_nodes)).split(",")
        return Result(
            status=status,
            exit_code=cause.code if cause else self.code,
            finished=utc(),
            cause=cause,
            failing_nodes=[host for host in fields["hosts"] if host in unfit],
            restarts=len(restarts),
            restart_cause=explained(self.recorded(restarts[0]), paths.logs, plan) if restarts else None,
            preflight=self.tried(paths.preflight_report, self.preflight),
            history=earlier,
            startup=self.tried(paths.startup, startup.read, paths, fields["hosts"], cost.queue_s(known)),
            cost=spent,
            spent=cost.spent([*((attempt.attempt, attempt.cost) for attempt in earlier), (paths.attempt, spent)]),
            **fields,
            **figures,
        )

    def recorded(self, folder: Path) -> Cause | None:
        """The first failure that is recorded in the folder."""
        warn, logs = self.warnings.append, self.paths.logs
        found = self.tried(folder, failure_records.read, folder, logs, warn=warn)
        return found[0].cause if found else None

    def unrecorded(self) -> Cause:
        """The cause of a failure that nobody recorded."""
        folder, logs, code = self.paths.folder, self.paths.logs, self.code
        why = "no rank left a record: the node, the container or the launcher failed, or the job was stopped"
        if not folder.exists():
            why = f"the folder of the attempt is gone: {folder}"
        elif (disk := self.tried(folder, shutil.disk_usage, folder)) and disk.free < _FULL:
            code, why = exit_codes.UNFIT, f"the disk is full, so logs and records are incomplete: {folder}"
        lines = [line for log in sorted(logs.glob("node-*.log")) for line in files.tail(log)]
        return Cause(node="", rank=None, code=code, why=why, log=str(logs), last_lines=lines[-20:])

    def without_end(self, plan: Plan) -> Cause | None:
        """Rank 0 as the cause, if it is dray's trainer and ended with exit code 0 but without its last line."""
        log = self.paths.rank_log(0)
        here = plan.world.shared_folder or log.exists()  # else another machine has the files
        if plan.recipe.train is None or not here:
            return None
        why = f"it ended with exit code 0 but left no `end` in {self.paths.metrics.name}"
        name, lines = plan.world.nodes[0].name, files.tail(log)
        return Cause(node=name, rank=0, code=exit_codes.FAILED, why=why, log=str(log), last_lines=lines)

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
        return "; ".join([f"{transports}, {best:.2f} GB/s of bus bandwidth", *slow])

    def figures(self) -> dict[str, Any]:
        """Steps, losses and speed from the metrics."""
        first: dict[str, Event] = {}
        last: dict[str, Event] = {}
        noticed: list[Event] = []
        for event in self.metrics:
            kind = str(event.get("event"))
            if kind in WARNED_OF:
                noticed.append(event)
            elif kind == "slow" and (times := number(event, "times")):
                rank, node = event.get("rank"), event.get("node")
                self.warnings.append(f"slow: rank {rank} on {node}, {times:.2f} times the median rank")
            elif kind != "step" or whole(event, "step") is not None:
                first.setdefault(kind, event)
                last[kind] = event
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
            "save_s": max(filter(None, (number(event, "seconds") for event in noticed)), default=None),
        }


def explained(cause: Cause | None, logs: Path, plan: Plan | None) -> Cause | None:
    """The cause with its name from causes.toml, if one fits; Slurm's own lines count as evidence."""
    if cause is None:
        return None
    cause = cause.model_copy(update={"evidence": [*cause.evidence, *failure_records.by_slurm(logs)]})
    return failure_records.redacted(causes.explained(cause), plan)
