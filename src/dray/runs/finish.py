"""How a run ended: make result.json from the files of nodes and ranks, even if they are damaged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from dray.contract import exit_codes, files, run_folder
from dray.contract.control_characters import printable
from dray.planning.schema import Plan
from dray.runs import again, capsule, causes, cost, grace, metrics, process_group, records, startup
from dray.runs.cost import Cost
from dray.runs.metrics import Metrics, number, whole
from dray.runs.recovery import Failure, recoveries
from dray.runs.result import Cause, Result
from dray.runs.stop import Stop, utc
from dray.runs.store import RunPaths, newest_checkpoint, reason, write_summary, written
from dray.runs.write import read

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
    left = _Left(paths, code)
    plan = left.tried(paths.plan, lambda: read(paths))
    # srun may report a failed node that it killed while the node was ending.
    if code not in (exit_codes.DONE, exit_codes.RETRY) and left.tried(paths.saved, paths.saved.is_file):
        left.code = code = exit_codes.RETRY
    failures = left.tried(paths.failures, left.restarts) or []
    first = failures[0][1] if failures else None
    by_user = left.asked_by_user()
    if not stopped or by_user:  # the user wants it to end, whatever else ends it too
        stopped = left.asked(by_user=by_user, heard=stopped is not None) or stopped
    status = "stopped" if stopped else "failed" if code else "done"
    checkpoint = left.newest_checkpoint(plan) if status != "done" else None
    saved = int(checkpoint.rpartition("-")[2]) if checkpoint else None
    figures = left.tried(paths.metrics, lambda: left.figures(None if status == "done" else saved or 0)) or {}
    # Stopped ranks may die in any way; none of them is the cause.
    ended = left.first_cause(paths.failures) if status == "failed" else None
    cause = (ended[1] if ended else left.unrecorded()) if status == "failed" else None
    if status == "done" and plan:
        cause = left.missing(plan, ended="train_seconds" in figures)
        status = "failed" if cause else "done"
    if plan:
        left.lone_ranks(plan)
    waited = cost.queue_s(known)
    own = spent or (cost.parse(known, plan.job, startup.step(paths)) if plan and known else None)
    history = left.tried(paths.run, lambda: again.history(paths)) or []
    hosts = [node.name for node in plan.world.nodes] if plan else []
    cause, first = (one and records.redacted(left.explained(one), plan) for one in (cause, first))
    result = Result(
        **printable(
            {
                "run": plan.run if plan else paths.run.name,
                "status": status,
                "exit_code": cause.code if cause else code,
                "finished": utc(),
                "world_size": plan.world.size if plan else None,
                "hosts": hosts,
                "cause": cause.model_dump() if cause else None,
                "failing_nodes": left.tried(paths.failing_nodes, lambda: again.failing_nodes(paths, plan)) or [],
                "restarts": len(failures),
                "restart_cause": first.model_dump() if first else None,
                "reason": stopped.reason if stopped else None,
                "at": stopped.at if stopped else None,
                "checkpoint": checkpoint,
                "saved_step": saved,
                "grace_s": grace.given(stopped, plan),
                "preflight": left.tried(paths.preflight_report, left.preflight),
                **figures,
                "recoveries": left.tried(paths.failures, lambda: left.recoveries(failures)) or [],
                "history": [one.model_dump() for one in history],
                "startup": left.tried(paths.startup, lambda: _dumped(startup.read(paths, hosts, waited))),
                "cost": _dumped(own),
                "spent": _dumped(cost.spent([*((one.attempt, one.cost) for one in history), (paths.attempt, own)])),
                "command": plan is not None and plan.recipe.train is None,
                "warnings": left.warnings,
            }
        )
    )
    if found := grace.warning(result, stopped):
        result.warnings.append(found)
    then = None if by_user else again.decide(result, plan, result.history, batch=batch)
    result = result.model_copy(update={"next": then})
    if status == "done":
        left.tried(paths.preflight, left.tidy)
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
    if then and (then.requeue or then.spare):
        line = f"{'spare' if then.spare else 'requeue'} {' '.join(then.exclude)}\n"
        left.tried(paths.next, lambda: files.write_atomic(paths.next, line))
    return result


def _dumped(found: BaseModel | None) -> dict[str, Any] | None:
    return found.model_dump() if found else None


class _Left:
    """The files that an attempt left, read one by one: an unreadable file does not hide another."""

    def __init__(self, paths: RunPaths, code: int) -> None:
        self.paths, self.code = paths, code
        self.metrics = Metrics(paths.metrics)
        self.warnings: list[str] = []

    def tried(self, what: Path, look: Callable[[], T]) -> T | None:
        """What `look` returns; if it fails, None and a warning that names `what`."""
        try:
            return look()
        except Exception as error:  # the result is printed whatever is in the run folder
            self.warnings.append(f"{what} cannot be read: {reason(error)}")
            return None

    def restarts(self) -> list[tuple[float, Cause | None]]:
        """The failure before each restart of all ranks, and its time."""
        count = sum(path.is_dir() for path in self.paths.failures.glob("restart-*"))
        folders = [self.paths.folder / run_folder.restart(number) for number in range(1, count + 1)]
        return [self.first_cause(folder) or (written(folder) or 0.0, None) for folder in folders]

    def asked(self, *, by_user: bool, heard: bool) -> Stop | None:
        """The stop that ranks have followed: a request in the stop file, with or without a signal that was `heard`."""
        at = self._asked_at()
        now = run_folder.NOW.encode() in self._asked_lines()
        ended = heard or self.code == exit_codes.RETRY or (now and self.code != exit_codes.DONE)
        return Stop(run_folder.BY_USER if by_user else "a request", utc(at)) if at and ended else None

    def asked_by_user(self) -> bool:
        """Whether `dray stop` asked the run to end."""
        return run_folder.BY_USER.encode() in self._asked_lines()

    def _asked_lines(self) -> list[bytes]:
        with suppress(OSError):
            return files.read(self.paths.stop).splitlines()
        return []

    def _asked_at(self) -> float | None:
        with suppress(OSError):
            asked = self.paths.stop.stat()
            return asked.st_mtime if asked.st_size else None
        return None

    def recoveries(self, within: list[tuple[float, Cause | None]]) -> list[dict[str, Any]]:
        """The recoveries from the end of the previous attempt and from each restart."""
        own, before = self.paths, RunPaths(self.paths.run, self.paths.attempt - 1)
        failures, events = [], chain(self.metrics)
        if before.attempt and (ended := written(before.result)):
            earlier = _Left(before, 0)
            time, cause = earlier.first_cause(before.failures) or (ended, None)
            failures.append(Failure(cause.why if cause else "the job ended", time, ended, written(own.plan) or 0.0))
            events = chain(earlier.metrics, self.metrics)
        for restart, (time, cause) in enumerate(within, 1):
            ended = written(own.folder / run_folder.restart(restart)) or 0.0
            failures.append(Failure(cause.why if cause else "unknown", time, ended))
        return [one.model_dump() for one in recoveries(failures, events)] if failures else []

    def first_cause(self, folder: Path) -> tuple[float, Cause] | None:
        """The earliest record of a failure, and its time."""
        found = self.tried(folder, lambda: self._records(folder))
        return found[0][:2] if found else None

    def _records(self, folder: Path) -> list[records.Record]:
        return records.read(folder, self.paths.logs, code=self.code, warn=self.warn)

    def warn(self, text: str) -> None:
        """Add a warning to the result."""
        self.warnings.append(text)

    def explained(self, cause: Cause) -> Cause:
        """The cause with its name from causes.toml, if one fits; Slurm's own lines count as evidence."""
        slurm = self.tried(self.paths.logs, lambda: records.by_slurm(self.paths.logs)) or []
        return causes.explained(cause.model_copy(update={"evidence": [*cause.evidence, *slurm]}))

    def unrecorded(self) -> Cause:
        """The cause of a failure that nobody recorded."""
        logs = self.tried(self.paths.logs, lambda: sorted(self.paths.logs.glob("node-*.log"))) or []
        lines = [line for log in logs for line in files.tail(log)]
        why = "no rank left a record: the node, the container or the launcher failed, or the job was stopped"
        log, code = str(self.paths.logs), self.code
        if not os.path.lexists(self.paths.folder):
            why = f"the folder of the attempt is gone: {self.paths.folder}"
        if self.tried(self.paths.folder, self._is_full):
            code = exit_codes.UNFIT
            why = f"the disk is full, so logs and records are incomplete: {self.paths.folder}"
        return Cause(node="", rank=None, code=code, why=why, log=log, last_lines=lines[-20:])

    def _is_full(self) -> bool:
        disk = os.statvfs(self.paths.folder)
        return disk.f_bavail * disk.f_frsize < metrics.LONGEST // 16

    def missing(self, plan: Plan, *, ended: bool) -> Cause | None:
        """Rank 0 as the cause, if training ended with exit code 0 but without its last metrics line or its model."""
        log, final = self.paths.rank_log(0), self.paths.final_model
        here = plan.world.shared_folder or self.tried(log, log.is_file)  # else another machine has the files
        if plan.recipe.train is None or not here:
            return None
        config = final / "config.json"
        left = [] if ended else [f"no `end` in {self.paths.metrics.name}"]
        kept = plan.recipe.checkpoint.final
        left += [f"no model in {final}"] if kept and not self.tried(config, config.is_file) else []
        why = f"it ended with exit code 0 but left {' and '.join(left)}"
        node, lines = plan.world.nodes[0].name, files.tail(log)
        cause = Cause(node=node, rank=0, code=exit_codes.FAILED, why=why, log=str(log), last_lines=lines)
        return cause if left else None

    def lone_ranks(self, plan: Plan) -> None:
        """Warn of ranks that joined no process group with the others."""
        if alone := self.tried(self.paths.process_group, lambda: process_group.warning(self.paths, plan)):
            self.warn(alone)

    def newest_checkpoint(self, plan: Plan | None) -> str | None:
        """The newest checkpoint in the plan's folder, or in the run's own."""
        folder = Path((plan.recipe.checkpoint.folder if plan else "") or self.paths.checkpoints)
        found = self.tried(folder, lambda: newest_checkpoint(folder))
        return str(found) if found else None

    def preflight(self) -> str | None:
        """The preflight's result in one line."""
        try:
            report = json.loads(files.read(self.paths.preflight_report))
        except FileNotFoundError:
            return None
        transports = " and ".join(sorted({rank["transport"] for rank in report["ranks"]}))
        best = max((row["bus_gb_s"] for row in report["sweep"]), default=0.0)
        slow = "".join(sorted({f"; {rank['warning']}" for rank in report["ranks"] if "warning" in rank}))
        slow += "".join(f"; slow: {line}" for line in report.get("slow_links", ()))
        return f"{transports}, {best:.2f} GB/s of bus bandwidth, in {sum(report['seconds'].values()):.1f} s{slow}"

    def tidy(self) -> None:
        """Remove files that a good run does not need: the preflight's rank files, and an empty log of srun."""
        for left in self.paths.preflight.glob("rank-*"):
            left.unlink()
        log = self.paths.logs / records.SRUN_LOG
        if log.exists() and not log.stat().st_size:
            log.unlink()

    def figures(self, saved: int | None) -> dict[str, Any]:
        """The result's figures from the metrics: steps, losses, speed, and seconds of training after step `saved`."""
        found: dict[str, Any] = {}
        kept = last_time = None
        told = []
        for event in self.metrics:
            kind = event.get("event")
            if kind in metrics.WARNED_OF:
                told.append(event)
                seconds = number(event, "seconds")
                found |= {"save_s": max(seconds, found.get("save_s", 0.0))} if seconds is not None else {}
                continue  # a checkpoint may be complete long after the last step
            if (now := number(event, "time")) is not None:
                last_time = now
                if kept is None or (kind == "step" and (whole(event, "step") or 0) <= (saved or 0)):
                    kept = now
            if kind == "start":
                first, last = whole(event, "first_step"), whole(event, "steps")
                found |= {"first_step": first} | ({"steps": last} if first and first == last else {})
            elif kind == "step" and (step := whole(event, "step")) is not None:
                loss = number(event, "loss")
                found |= {"steps": step, "loss_first": found.get("loss_first", loss), "loss_last": loss}
            elif kind == "slow" and None not in (slow := [whole(event, "rank"), number(event, "times")]):
                one = {
                    "rank": slow[0],
                    "node": str(event.get("node")),
                    "times": slow[1],
                    "step": whole(event, "step"),
                }
                found.setdefault("slow_ranks", []).append(one)
            elif kind == "eval":
                found["perplexity"] = number(event, "perplexity")
            elif kind == "end":
                found |= {name: number(event, name) for name in ("tokens_per_s", "train_seconds")}
                found["sample"] = str(event.get("sample") or "")
        self.warnings += [*self.metrics.warnings(), *metrics.result_warnings(told)]
        if saved is not None and kept is not None and last_time is not None:
            found["lost_s"] = round(max(0.0, last_time - kept), 3)
        return found
