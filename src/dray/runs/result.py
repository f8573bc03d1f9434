"""result.json: how an attempt ended, and the summary that a run prints last."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from dray.contract import exit_codes, files
from dray.contract.control_characters import printable
from dray.contract.findings import counted
from dray.contract.ranges import compress_hosts
from dray.runs.metrics import Cost, Spent, Startup
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

    @property
    def is_lost_node(self) -> bool:
        """Whether the others lost a node, which has recorded nothing itself."""
        return self.code == exit_codes.RETRY and self.rank is None and bool(self.node)

    @property
    def head(self) -> str:
        """The first line of what happened."""
        return self.why.partition("\n")[0]


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
    why: str | None = None
    """The first line of its cause, or what stopped it."""
    steps: int | None = None
    """The last step that it logged."""
    requeued: bool = False
    """Whether dray requeued the job after it."""
    cost: Cost | None = None
    """The cost of the attempt; null if unknown."""

    @classmethod
    def of(cls, result: Result | None, number: int) -> Attempt:
        """The summary of the attempt with this result; None if a node died before it could write one."""
        if result is None:
            return cls(attempt=number, status=UNKNOWN, why="it left no result")
        why = result.cause.head if result.cause else result.reason
        requeued = result.next is not None and result.next.requeue
        return cls(
            attempt=number, status=result.status, why=why, steps=result.steps, requeued=requeued, cost=result.cost
        )


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
    save_s: float | None = None
    """Seconds that the slowest checkpoint took until it was complete."""
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
    """Unreadable files, warnings in the metrics, and slow ranks."""


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
    lines = list[str]()
    if cause := result.cause:
        lines += failed(cause, "failed", shown)
        if cause.name != UNKNOWN:
            lines.append(f"  cause: {cause.name}")
            if not any(line.startswith("  fix:") for line in [*cause.why.splitlines(), *cause.last_lines]):
                lines.append(f"  fix: {cause.fix}")
        if result.failing_nodes:
            names = compress_hosts(result.failing_nodes)
            lines.append(f"failing nodes: {names} (sbatch --exclude={shlex.quote(names)})")
    elif result.status == "stopped":
        step = f"after step {result.steps}" if result.steps else "before the first step was logged"
        lines.append(f"stopped by {result.reason} at {result.at}{'' if result.command else f', {step}'}")
    else:
        lines += _done(result)
    if result.checkpoint or result.status == "stopped":
        lines += _left(result, again or next_command(paths))
    lines += notes(result)
    lines += [f"warning: {warning}" for warning in result.warnings]
    lines.append(f"run folder: {paths.run}")
    if result.cause:
        lines.append(f"exit code: {result.exit_code}")
    return "\n".join(lines)


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


def failed(cause: Cause, head: str, shown: int | None = None) -> Iterator[str]:
    """Who failed, how, and the end of its log, unless rank `shown` was on screen."""
    yield f"{head}: {who(cause)}: {cause.why}"
    if cause.rank is None or cause.rank != shown:
        known = cause.why.splitlines()
        yield from (f"  | {line}" for line in cause.last_lines[-12:] if line not in known)
    if cause.log:
        yield f"  log: {cause.log}"


def _done(result: Result) -> Iterator[str]:
    parts = [counted(result.steps, "step") if result.steps else "exit code 0"]
    if result.loss_first is not None and result.loss_last is not None:
        parts.append(f"loss {result.loss_first:.3f} -> {result.loss_last:.3f}")
    if result.perplexity is not None:
        parts.append(f"perplexity {result.perplexity:.2f}")
    if result.tokens_per_s:
        parts.append(f"{result.tokens_per_s:,.0f} tokens/s")
    if result.world_size:
        parts.append(f"{counted(result.world_size, 'rank')} on {' '.join(result.hosts)}")
    yield f"done: {', '.join(parts)}"
    if result.preflight:
        yield f"preflight: {result.preflight}"
    if result.sample:
        yield f"sample: {result.sample}"


def notes(result: Result) -> Iterator[str]:
    """Restarts, and whether the job continues by itself."""
    if result.restarts:
        first = result.restart_cause
        yield f"restarts: {result.restarts}" + (f", first after {who(first)}: {first.head}" if first else "")
    if then := result.next:
        without = f", without {' '.join(then.exclude)}" if then.exclude else ""
        head = "" if then.spare else "requeue: " if then.requeue else "requeue: no; "
        yield f"{head}{then.why}{without}"


def _left(result: Result, again: str) -> Iterator[str]:
    """What is saved, and how to resume."""
    if result.checkpoint:
        yield f"  safe:   all up to step {result.saved_step}, in {result.checkpoint}"
        yield f"  resume: {again}"
        return
    none = "nothing yet; checkpoint.every=N saves every N steps"
    yield f"  safe:   {'what the command itself saved' if result.command else none}"
    yield f"  again:  {again}"
