"""How a run ended: make result.json from the files of nodes and ranks, even if they are damaged.

The first failure on record is the cause, and causes.toml may name it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import dropwhile, pairwise
from pathlib import Path
from re import Pattern
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict

from dray.contract import exit_codes, failures, files, run_folder, secrets
from dray.contract.control_characters import printable
from dray.planning.schema import Plan
from dray.planning.world import fewer
from dray.runs import capsule, metrics
from dray.runs.metrics import WARNED_OF, Cost, Event, Metrics, number, result_warnings, whole
from dray.runs.result import Cause, Next, Result, history
from dray.runs.status import NODE_FAILURE, PREEMPTION, REQUEUE, TIME_LIMIT, Stop, stop_requests, utc, write_summary
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
            write_blind_record(paths)
    ended = Ended(paths, code, stopped)
    result = ended.result(known, spent)
    plan, then = ended.plan, None
    if plan and not ended.by_user:
        then = decide_next(result, plan, batch=batch)
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
                lines += requeue_options(known, plan, then.exclude)
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
        if stopped and stopped.reason == REQUEUE and self.first and self.first.is_lost_node:
            stopped = stopped._replace(reason=NODE_FAILURE)  # Slurm requeues the job of a node that does not answer
        # srun may report a node that it killed while the node was ending, or a rank that lost the one that ended first.
        has_ended = paths.saved.is_file() or (not stopped and self.first and self.first.code == exit_codes.RETRY)
        self.code = exit_codes.RETRY if code and has_ended else code
        requests = stop_requests(paths.folder)
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
            spent = spent or metrics.cost_of_job(known)
            if alone := self.tried(paths.process_group, world_size_warning, paths, plan):
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
            startup=self.tried(paths.startup, metrics.read_startup, paths, fields["hosts"], metrics.queue_s(known)),
            cost=spent,
            spent=metrics.sum_costs(
                [*((attempt.attempt, attempt.cost) for attempt in earlier), (paths.attempt, spent)]
            ),
            **fields,
            **figures,
        )

    def recorded(self, folder: Path) -> Cause | None:
        """The first failure that is recorded in the folder."""
        warn, logs = self.warnings.append, self.paths.logs
        found = self.tried(folder, read_failures, folder, logs, warn=warn)
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
    cause = cause.model_copy(update={"evidence": [*cause.evidence, *slurm_messages(logs)]})
    return redacted_cause(named_cause(cause), plan)


# Failures on record --------------------------------------------------------------------------------------------------

SRUN_LOG = "srun.log"
_SLURM = re.compile(
    r"^(?:slurmstepd|srun)\b.{0,80}error: .{0,200}(?:oom[_-]kill|OOM Killed|DUE TO |ode failure|missing step on )"
)
# What a task ends with that does not see the run's folder (slurm/job.sh), as srun tells it.
_BLIND = re.compile(r"^srun: error: (\S+): tasks? .*: Exited with exit code 96$", re.MULTILINE)


class FailureRecord(NamedTuple):
    """The record of one failure."""

    time: float
    cause: Cause
    lost: bool
    """Whether another node reported that this node was lost."""


def read_failures(folder: Path, logs: Path, *, warn: Callable[[str], None]) -> list[FailureRecord]:
    """The records in order of cause; a damaged record is a warning, which names its node or rank.

    A lost node comes before the ranks that failed because of it; contract/failures.py orders the rest.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            try:
                found.append(_read_failure(path, logs))
            except Exception as error:  # whatever is in it
                warn(f"{path} cannot be read: {reason(error)}")
    lost = {one.cause.node for one in found if one.lost}
    first = min((one.time for one in found), default=0.0)

    def order(one: FailureRecord) -> float:
        if one.cause.node in lost:  # the records of its own ranks say more
            return one.time - failures.UNNOTICED_S
        return failures.cause_order(one.time, first, lambda: named_cause(one.cause).name == FOLLOWS)

    return sorted(found, key=order)


def write_blind_record(paths: RunPaths) -> None:
    """Write the record of nodes that did not see the run's folder, and so could write none."""
    names = ",".join(_BLIND.findall("\n".join(files.tail(paths.logs / SRUN_LOG, 1000))))
    if not names or any(paths.failures.glob("rank-*.json")):  # a program that ends with this code leaves its own
        return
    verb = "do" if "," in names or "[" in names else "does"
    record = {
        "time": time.time(), "node": names, "rank": None, "code": exit_codes.CONFIG, "log": None, "last_lines": [],
        "why": f"{names} {verb} not see {paths.run.parent}\n  fix:    set DRAY_RUNS to a folder that all nodes share",
    }  # fmt: skip
    files.write_atomic(paths.failures / "node-blind.json", json.dumps(record))


def _read_failure(path: Path, logs: Path) -> FailureRecord:
    record = json.loads(files.read(path))
    cause = Cause.model_validate(record)
    if cause.log is None and cause.rank is not None:  # its supervisor could write only one line
        log = logs.parent / run_folder.rank_log(cause.rank)
        cause = cause.model_copy(update={"log": str(log), "last_lines": files.tail(log)})
    return FailureRecord(float(record["time"]), cause, bool(record.get("lost")))


def slurm_messages(logs: Path) -> list[str]:
    """Slurm's own messages about the end of the nodes, from their logs and srun's."""
    lines = [line for log in [*sorted(logs.glob("node-*.log")), logs / SRUN_LOG] for line in files.tail(log)]
    return list(dict.fromkeys(f"Slurm: {line[:300]}" for line in lines if _SLURM.match(line[:1000])))[:4]


def redacted_cause(cause: Cause, plan: Plan | None) -> Cause:
    """The cause without values of pass_env, which lines of a launcher or an engine may contain."""
    values = secrets.passed(plan.recipe.pass_env if plan else (), os.environ)

    def clean(lines: list[str]) -> list[str]:
        return [secrets.redacted(line, values) for line in lines]

    changed = {"last_lines": clean(cause.last_lines), "evidence": clean(cause.evidence)}
    return cause.model_copy(update={"why": secrets.redacted(cause.why, values), **changed})


# The names of causes -------------------------------------------------------------------------------------------------

FOLLOWS = "another rank ended first"
_CAUSES_FILE = Path(__file__).with_name("causes.toml")
_LONGEST = 4000  # characters of a line that are searched
_BY_RANK = r"(?:\[rank\d{1,9}\]: ?)?"  # torch's prefix for each line of an exception and of its log
_TRACEBACK = re.compile(_BY_RANK + r'(?:Traceback \(most recent call last\):|  File ".{1,300}", line \d{1,9}, in )')
_DETAIL = re.compile(r"  (?:where|wanted|found|fix): ")
_LOGGED = re.compile(
    _BY_RANK + r"\[?[IW]\d{4} \d\d:\d\d:\d\d|.{1,300}\.py:\d{1,9}: \w{1,60}Warning: |  warnings\.warn\("
)
"""Lines that torch and Python only log or warn with."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sign(_Strict):
    """A sign of a cause: every given field must match."""

    why: Pattern[str] | None = None
    """Matches the reason in the failure's record, which is dray's own text."""
    lines: Pattern[str] | None = None
    """Matches one of the last lines, or the reason."""
    evidence: Pattern[str] | None = None
    codes: tuple[int, ...] = ()
    reason: tuple[str, ...] = ()
    """What stopped the run."""
    source: str
    """The program or document that the text comes from."""


class KnownCause(_Strict):
    """A cause that causes.toml names."""

    name: str
    fix: str
    again: bool = False
    """Whether another attempt may succeed (exit code 75), whatever code the rank ended with."""
    sign: tuple[Sign, ...]


@cache
def known_causes() -> tuple[KnownCause, ...]:
    """All causes, in the order in which they are tried."""
    return tuple(map(KnownCause.model_validate, tomllib.loads(_CAUSES_FILE.read_text(encoding="utf-8"))["cause"]))


def named_cause(cause: Cause) -> Cause:
    """The cause with its name and fix; its last lines begin where the failure shows."""
    lines = [line for text in (cause.why, *cause.last_lines) for line in text.splitlines()]
    for one in known_causes():
        for sign in one.sign:
            if not sign.reason and _fits(sign, cause, lines):
                code = exit_codes.RETRY if one.again else cause.code
                last_lines = _from_failure(cause.last_lines, sign)
                return cause.model_copy(
                    update={"name": one.name, "fix": one.fix, "code": code, "last_lines": last_lines}
                )
    return cause.model_copy(update={"last_lines": _from_failure(cause.last_lines)})


def cause_of_reason(reason: str | None) -> dict[str, str]:
    """The name and fix for this reason of a stopped run; empty if it has none."""
    for one in known_causes():
        if any(reason in sign.reason for sign in one.sign):
            return {"name": one.name, "fix": one.fix}
    return {}


def _fits(sign: Sign, cause: Cause, lines: list[str]) -> bool:
    texts = ((sign.why, cause.why.splitlines()), (sign.lines, lines), (sign.evidence, cause.evidence))
    return (not sign.codes or cause.code in sign.codes) and all(
        any(pattern.search(line[:_LONGEST]) for line in where) for pattern, where in texts if pattern
    )


def _from_failure(lines: list[str], sign: Sign | None = None) -> list[str]:
    """The lines from the first traceback, finding or sign; else without torch's log lines."""
    for place, (line, below) in enumerate(pairwise([*lines, ""])):
        is_finding = line[:1].strip() and _DETAIL.match(below)
        if is_finding or _TRACEBACK.match(line) or (sign and sign.lines and sign.lines.search(line[:_LONGEST])):
            return lines[place:]
    return list(dropwhile(_LOGGED.match, lines)) or lines


# Ranks that trained separately ---------------------------------------------------------------------------------------

_WORLD_SIZE_FIX = "call init_process_group() in each rank without rank= and world_size=: it reads RANK and WORLD_SIZE"


def world_size_warning(paths: RunPaths, plan: Plan) -> str | None:
    """A warning of a process group smaller than the world, which the result would not show; None if all ranks share a
    group, no rank has one, or nothing was recorded."""
    try:
        found = json.loads(files.read(paths.process_group))
    except FileNotFoundError:
        return None
    group = f"the largest process group has {int(found['largest'])} of the {plan.world.size} ranks"
    return f"{group}: the other ranks trained separately, maybe in the same files; {_WORLD_SIZE_FIX}"


# The next job --------------------------------------------------------------------------------------------------------

_NO_NODE_S = ("the disk is full", "disk quota exceeded")
"""Causes that another node would meet too."""
_SBATCH_OPTIONS = {
    "job-name": "JobName", "account": "Account", "qos": "QOS", "partition": "Partition", "time": "TimeLimit",
    "constraint": "Features", "reservation": "Reservation", "licenses": "Licenses", "mem": "MinMemoryNode",
    "mem-per-cpu": "MinMemoryCPU", "cpus-per-task": "CPUs/Task", "gres": "TresPerNode", "exclude": "ExcNodeList",
    "mail-user": "MailUser", "mail-type": "MailType", "chdir": "WorkDir", "output": "StdOut",
}  # fmt: skip
"""Options of sbatch, and where `scontrol show job` has their values."""
# A value may have spaces: it ends before the next field.
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|$)", re.MULTILINE)


def decide_next(result: Result, plan: Plan, *, batch: bool) -> Next | None:
    """What comes next; None if the run ended, was cancelled, or would fail in the same way.

    Only a `batch` job can be requeued; a run in an salloc allocation may continue on other or fewer nodes.
    """
    unfit = _unfit(result)
    failed = unfit or _lost(result)
    if failed and (why := _without(plan, len(failed))):
        return Next(requeue=False, spare=True, exclude=failed, why=why)
    if not batch or not (unfit or _may_continue(result)):
        return None
    limit, used = plan.recipe.max_requeues, sum(attempt.requeued for attempt in result.history)
    saved = result.command or (result.saved_step or 0) > (result.first_step or 0)
    if not limit:
        return Next(requeue=False, why="set max_requeues=3 in the recipe, and dray requeues such a job")
    if used >= limit:
        return Next(requeue=False, why=f"max_requeues = {limit} is used up")
    if not unfit and not saved:
        return Next(requeue=False, why="this attempt saved no checkpoint, so the next would repeat it")
    return Next(requeue=True, exclude=unfit, why=f"{used + 1} of {limit}")


def _without(plan: Plan, failed: int) -> str:
    """How the job continues at once without that many nodes; empty if it cannot."""
    world, recipe = plan.world, plan.recipe
    if failed <= len(world.spares):
        return f"spare nodes take over: {' '.join(world.spares[:failed])}"
    count = fewer(recipe, world.ranks_per_node, len(world.nodes) + len(world.spares) - failed)
    return f"fewer nodes: {count} of {len(world.nodes)} continue (min_nodes = {recipe.min_nodes})" if count else ""


def _may_continue(result: Result) -> bool:
    """A command alone knows whether another attempt would resume, and says so by exit code 75."""
    asked_again = result.exit_code == exit_codes.RETRY
    if result.status == "failed" or result.reason == "SIGUSR1":  # by sbatch --signal, any time before the end
        return asked_again
    return result.reason in (TIME_LIMIT, PREEMPTION) and (asked_again or not result.command)


def _lost(result: Result) -> list[str]:
    """The node that was lost."""
    cause = result.cause
    if cause and cause.is_lost_node and cause.node in result.hosts:
        return [cause.node]
    return []


def _unfit(result: Result) -> list[str]:
    """The nodes found unfit; none if all nodes are, because then the nodes are not the reason."""
    cause, hosts = result.cause, result.hosts
    if not cause or cause.code != exit_codes.UNFIT or cause.name in _NO_NODE_S or cause.node not in hosts:
        return []
    nodes = result.failing_nodes or [cause.node]
    return [] if 1 < len(nodes) == len(hosts) else nodes


def requeue_options(known: str, plan: Plan, exclude: list[str]) -> list[str]:
    """Options of sbatch for a job like the one that scontrol shows in `known`, without the nodes in `exclude`.

    Where Slurm does not put jobs back, the batch script submits such a job. Empty if scontrol did not answer.
    """
    shown = {key: value for key, value in _FIELD.findall(known) if value not in ("", "(null)", "N/A")}
    if "JobName" not in shown:
        return []
    shown["ExcNodeList"] = ",".join([*filter(None, [shown.get("ExcNodeList")]), *exclude])
    shown["TresPerNode"] = shown.get("TresPerNode", "").replace("gres/gpu", "gpu").replace("gres/", "")
    # The next job is no task of an array, and would take these for other numbers.
    for pattern, field in (("%A", "ArrayJobId"), ("%a", "ArrayTaskId")):
        shown["StdOut"] = shown.get("StdOut", "").replace(pattern, shown.get(field, pattern))
    no_value = {"mem": "0", "mem-per-cpu": "0"}  # --mem=0 would be all of it
    values = {option: shown.get(field, "") for option, field in _SBATCH_OPTIONS.items()}
    found = [f"--{option}={value}" for option, value in values.items() if value not in ("", no_value.get(option))]
    found += ["--open-mode=append"] if shown["StdOut"] else []
    found += ["--exclusive"] if shown.get("OverSubscribe") == "NO" else []
    found += ["--no-kill"] if plan.recipe.replaces_nodes else []
    return [*found, f"--signal=B:USR1@{plan.grace_s}"]  # which scontrol does not tell
