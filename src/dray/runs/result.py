"""result.json: how an attempt ended, and the summary that a run prints last."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from dray.contract import files
from dray.contract.control_characters import printable
from dray.contract.findings import counted
from dray.contract.hostnames import compress
from dray.runs.cost import Cost, Spent
from dray.runs.startup import Startup
from dray.runs.store import Attempt as StoredAttempt
from dray.runs.store import Run, RunPaths, attempts, require_version

UNKNOWN = "unknown"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Cause(_Part):
    """Why a run failed: the node or rank that failed first."""

    node: str
    """The name of the node."""
    rank: Annotated[int, Field(ge=0)] | None
    """The rank; null if the node itself failed."""
    code: Annotated[int, Field(ge=1, le=255)]
    """The exit code, from 1 to 255 as in a shell."""
    why: str
    """What happened, as recorded."""
    log: str | None
    """The log of the rank or the node."""
    last_lines: list[str]
    """The last lines of that log, from the line where the failure shows."""
    evidence: list[str] = []
    """What the node saw when it failed: memory, kernel log, disks."""
    name: str = UNKNOWN
    """The cause's name in runs/causes.toml, or unknown."""
    fix: str = ""
    """What to do, if the cause is known."""
    source: str = ""
    """The program or document that the matched text comes from."""

    @property
    def head(self) -> str:
        """The first line of what happened."""
        return self.why.partition("\n")[0]


class Recovery(_Part):
    """One failure from which the run recovered. Times are in seconds."""

    why: str
    """What failed."""
    step: int
    """The first step logged after it."""
    detect_s: float
    """From the last logged step to the record of the failure; it was noticed within this time."""
    stop_s: float
    """Until all ranks had ended."""
    queue_s: float = 0.0
    """Until Slurm started the next attempt; 0 if the ranks restarted within the job."""
    start_s: float
    """Until the model was built: container, rendezvous, imports and datasets."""
    load_s: float
    """Reading the checkpoint, not part of another time."""
    step_s: float
    """Until the first step was logged."""

    @property
    def total_s(self) -> float:
        """From the record of the failure to the next logged step."""
        return self.stop_s + self.queue_s + self.start_s + self.load_s + self.step_s

    def __str__(self) -> str:
        queue = f"queue {self.queue_s:.1f}, " if self.queue_s else ""
        rest = f"start {self.start_s:.1f}, load {self.load_s:.1f}, step {self.step_s:.1f}"
        why = self.why.partition("\n")[0]
        return f"step {self.step} {self.total_s:.1f} s after {why} (stop {self.stop_s:.1f}, {queue}{rest})"


class Next(_Part):
    """Whether and why the job is requeued, or continues with other or fewer nodes."""

    requeue: bool
    """Whether the job is requeued."""
    spare: bool = False
    """Whether the job continues at once, with spare nodes or with fewer nodes."""
    exclude: list[str] = []
    """Lost or unfit nodes that the next attempt must not use."""
    why: str
    """Why the job continues, or does not."""


class Attempt(_Part):
    """The summary of an earlier attempt in later results."""

    attempt: Annotated[int, Field(ge=1)]
    """The number of the attempt; the first is 1."""
    status: str
    """How it ended, as in result.json."""
    exit_code: int | None = None
    """Its exit code."""
    why: str | None = None
    """The first line of its cause, or what stopped it."""
    hosts: str = ""
    """The names of its nodes, as Slurm writes a list: n[1-3,7]."""
    first_step: int | None = None
    """The step from which it resumed; 0 from the beginning."""
    steps: int | None = None
    """The last step that it logged."""
    saved_step: int | None = None
    """The step of its newest checkpoint."""
    lost_s: float | None = None
    """Seconds of training after that checkpoint, which are lost."""
    finished: str | None = None
    """When it ended, in UTC."""
    requeued: bool = False
    """Whether dray requeued the job after it."""
    cost: Cost | None = None
    """The cost of the attempt; null if unknown."""

    @classmethod
    def of(cls, result: Result | None, number: int) -> Attempt:
        """The summary of the attempt with this result; None if a node died before it could write one."""
        if result is None:
            return cls(attempt=number, status=UNKNOWN, why="it left no result")
        fields = result.model_dump() | {
            "attempt": number,
            "why": result.cause.head if result.cause else result.reason,
            "hosts": compress(result.hosts),
            "requeued": result.next is not None and result.next.requeue,
        }
        return cls(**fields)


class SlowRank(_Part):
    """A rank that was steadily slower than the others."""

    rank: Annotated[int, Field(ge=0)]
    """The rank."""
    node: str
    """The name of its node."""
    times: float
    """The rank's own time in a step, divided by the median rank's."""
    step: int | None
    """The step at which it was reported."""


class Result(_Part):
    """How an attempt ended."""

    version: Literal[1] = 1
    """Version of the format; it increases when a valid file becomes invalid. Old files have none."""
    run: str
    """The run's name."""
    status: str
    """done, stopped or failed."""
    exit_code: int
    """The exit code of the attempt."""
    finished: str
    """When it ended, in UTC."""
    world_size: int | None
    """The number of ranks on all nodes; null if the plan cannot be read."""
    hosts: list[str]
    """The names of the nodes in the plan."""
    first_step: int | None = None
    """The step from which it resumed; 0 from the beginning."""
    steps: int | None = None
    """The last step that was logged."""
    loss_first: float | None = None
    """The first loss that was logged."""
    loss_last: float | None = None
    """The last loss that was logged."""
    perplexity: float | None = None
    """Perplexity in the last evaluation."""
    tokens_per_s: float | None = None
    """Tokens a second, from the first step to the last."""
    train_seconds: float | None = None
    """Seconds of all training steps."""
    sample: str | None = None
    """Text that the model wrote after the training."""
    slow_ranks: list[SlowRank] = []
    """Ranks that were steadily slower than the others."""
    preflight: str | None = None
    """The preflight's result in one line."""
    cause: Cause | None = None
    failing_nodes: list[str] = []
    """Nodes that failed their node check before the rendezvous."""
    restarts: int = 0
    """How often the runners restarted all ranks."""
    restart_cause: Cause | None = None
    """The failure before the first restart; `cause` is what ended the run."""
    reason: str | None = None
    """What stopped the run."""
    at: str | None = None
    """When the run was stopped, in UTC."""
    checkpoint: str | None = None
    """The newest checkpoint of a stopped or failed run."""
    saved_step: int | None = None
    """The step of that checkpoint."""
    lost_s: float | None = None
    """Seconds of training after that checkpoint, which are lost."""
    recoveries: list[Recovery] = []
    """The recoveries from failures; the first may be from the previous attempt's failure."""
    save_s: float | None = None
    """Seconds that the slowest checkpoint took until it was complete."""
    grace_s: float | None = None
    """Grace in seconds: measured if the run was signalled, else as planned."""
    next: Next | None = None
    """Whether the job continues by itself; null if the run ended or another attempt would not help."""
    history: list[Attempt] = []
    """The attempts before this one."""
    startup: Startup | None = None
    """How long each part of the start took; null if nothing was measured."""
    cost: Cost | None = None
    """The cost of this attempt; null if unknown."""
    spent: Spent | None = None
    """The cost of all attempts, with this one."""
    command: bool = False
    """Whether a command ran instead of dray's trainer; dray does not know what it saves."""
    warnings: list[str] = []
    """Unreadable files, warnings in the metrics, and a grace that is too short."""


def read(path: Path | str) -> Result:
    """Read a result; OSError or ValueError if it is damaged or of another version."""
    found = from_json(files.read(path))
    require_version(found)
    return Result.model_validate(printable(found))


def result_of(paths: RunPaths) -> Result | None:
    """The attempt's result; None while it runs, or if none was written."""
    with suppress(OSError, ValueError):
        return read(paths.result)
    return None


def history(paths: RunPaths) -> list[Attempt]:
    """The earlier attempts in order."""
    earlier = [RunPaths(paths.run, number) for number in attempts(paths.run) if number < paths.attempt]
    return [Attempt.of(result_of(before), before.attempt) for before in earlier]


def summary(result: Result, paths: RunPaths, again: str = "", shown: int | None = None) -> str:
    """The summary that a run prints last. `again` is the command for its next attempt; rank `shown` was on screen."""
    return "\n".join(_lines(result, paths, again or next_command(paths), shown))


def next_command(paths: RunPaths) -> str:
    """The command that starts the next attempt of a run."""
    run = shlex.quote(str(paths.run))
    if not StoredAttempt(Run(paths.run), paths.attempt).job:
        return f"the same command with --run={run}"
    return f"dray submit --run={run}  # or sbatch slurm/multinode.sh with the same --run"


def who(cause: Cause) -> str:
    """The rank or node that failed."""
    rank = "the launch" if cause.rank is None else f"rank {cause.rank}"
    return f"{rank} on {cause.node}" if cause.node else rank


def _lines(result: Result, paths: RunPaths, again: str, shown: int | None) -> Iterator[str]:
    if result.cause:
        yield from _failed(result, result.cause, paths, shown)
        if result.checkpoint:
            yield from left(result, again)
    elif result.status == "stopped":
        step = f"after step {result.steps}" if result.steps else "before the first step was logged"
        yield f"stopped by {result.reason} at {result.at}{'' if result.command else f', {step}'}"
        yield from left(result, again)
    else:
        yield from _done(result)
    yield from notes(result)
    for slow in result.slow_ranks:
        yield f"slow: rank {slow.rank} on {slow.node}, {slow.times:.2f} times the median rank"
    yield from (f"warning: {warning}" for warning in result.warnings)
    yield f"run folder: {paths.run}"
    if result.cause:
        yield f"exit code: {result.exit_code}"


def _failed(result: Result, cause: Cause, paths: RunPaths, shown: int | None) -> Iterator[str]:
    yield f"failed: {who(cause)}: {cause.why}"
    known = cause.why.splitlines()
    if cause.rank is None or cause.rank != shown:
        yield from (f"  | {line}" for line in cause.last_lines[-12:] if line not in known)
    if cause.log:
        yield f"  log: {cause.log}"
    if cause.name != UNKNOWN:
        yield f"  cause: {cause.name}"
        if cause.fix and not any(line.startswith("  fix:") for line in known + cause.last_lines):
            yield f"  fix: {cause.fix}"
    if result.failing_nodes:
        names = compress(result.failing_nodes)
        yield f'failing nodes: {names} (sbatch --exclude="$(cat {shlex.quote(str(paths.failing_nodes))})")'


def _done(result: Result) -> Iterator[str]:
    head = counted(result.steps, "step") if result.steps else "exit code 0"
    if result.steps and result.first_step == result.steps:
        head = f"nothing left to do: step {result.first_step} of {result.steps}"
    figures = [head]
    if result.loss_first is not None and result.loss_last is not None:
        figures.append(f"loss {result.loss_first:.3f} -> {result.loss_last:.3f}")
    if result.perplexity is not None:
        figures.append(f"perplexity {result.perplexity:.2f}")
    if result.tokens_per_s:
        figures.append(f"{result.tokens_per_s:,.0f} tokens/s")
    if result.world_size:
        figures.append(f"{counted(result.world_size, 'rank')} on {' '.join(result.hosts)}")
    yield "done: " + ", ".join(figures)
    if result.preflight:
        yield f"preflight: {result.preflight}"
    if result.sample:
        yield f"sample: {result.sample}"


def notes(result: Result) -> Iterator[str]:
    """Restarts, recoveries, and whether the job continues by itself."""
    if result.restarts:
        first = result.restart_cause
        yield f"restarts: {result.restarts}" + (f", first after {who(first)}: {first.head}" if first else "")
    yield from (f"recovered: {recovery}" for recovery in result.recoveries)
    if then := result.next:
        without = f", without {' '.join(then.exclude)}" if then.exclude else ""
        head = "" if then.spare else "requeue: " if then.requeue else "requeue: no; "
        yield f"{head}{then.why}{without}"


def left(result: Result, again: str) -> Iterator[str]:
    """What is saved, and how to resume."""
    if result.checkpoint:
        yield f"  safe:   all up to step {result.saved_step}, in {result.checkpoint}"
        yield f"  resume: {again}"
        return
    none = "nothing yet; checkpoint.every=N saves every N steps"
    yield f"  safe:   {'what the command itself saved' if result.command else none}"
    yield f"  again:  {again}"
