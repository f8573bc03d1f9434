"""result.json, and the summary that a run prints last."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import from_json

from dray.contract import files
from dray.contract.control_characters import printable
from dray.contract.findings import counted
from dray.runs.cost import Cost, Spent
from dray.runs.recovery import Next, Recovery
from dray.runs.startup import Startup
from dray.runs.store import OR_NONE, Run, RunPaths, require_version
from dray.runs.store import Attempt as Attempt_

UNKNOWN = "unknown"
_MOST, _LONGEST = 16, 1000  # lines of evidence, and letters of each
_SHOWN = 20  # nodes in a line


def _evidence(lines: Any) -> list[str]:  # noqa: ANN401  any JSON value: a damaged part hides no failure
    texts = lines if isinstance(lines, list) else []
    return [line[:_LONGEST] for line in texts if isinstance(line, str)][:_MOST]


class Cause(BaseModel):
    """Why a run failed: the node or rank that failed first."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

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
    evidence: Annotated[list[str], BeforeValidator(_evidence)] = []
    """What the node saw when it failed: memory, kernel log, disks."""
    name: str = UNKNOWN
    """The cause's name in runs/causes.toml, or unknown."""
    fix: str = ""
    """What to do, if the cause is known."""
    source: str = ""
    """The program or document that the matched text comes from."""


class Attempt(BaseModel):
    """The summary of an earlier attempt in later results."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

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
    cost: Annotated[Cost | None, OR_NONE] = None
    """The cost of the attempt; null if unknown."""


class SlowRank(BaseModel):
    """A rank that was steadily slower than the others."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    rank: Annotated[int, Field(ge=0)]
    """The rank."""
    node: str
    """The name of its node."""
    times: float
    """The rank's own time in a step, divided by the median rank's."""
    step: int | None
    """The step at which it was reported."""


class Result(BaseModel):
    """How an attempt ended."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

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
    startup: Annotated[Startup | None, OR_NONE] = None
    """How long each part of the start took; null if nothing was measured."""
    cost: Annotated[Cost | None, OR_NONE] = None
    """The cost of this attempt; null if unknown."""
    spent: Annotated[Spent | None, OR_NONE] = None
    """The cost of all attempts, with this one."""
    command: bool = False
    """Whether a command ran instead of dray's trainer; dray does not know what it saves."""
    warnings: list[str] = []
    """Unreadable files, warnings in the metrics, and a grace that is too short."""


def read(path: Path | str) -> Result:
    """Read a result; OSError or ValueError if it is damaged or of another version."""
    found = from_json(files.read(path))
    require_version(found, path)
    return Result.model_validate(printable(found))


def result_of(paths: RunPaths) -> Result | None:
    """The attempt's result; None while it runs, or if none was written."""
    with suppress(OSError, ValueError):
        return read(paths.result)
    return None


def summary(result: Result, paths: RunPaths, again: str = "", shown: int | None = None) -> str:
    """The summary that a run prints last. `again` is the command for its next attempt; rank `shown` was on screen."""
    again = again or next_command(paths)
    ended, go_on = _ended(result, paths, again, shown), comes_next(result)
    lines = [*ended, *restarts(result), *(f"recovered: {one}" for one in result.recoveries), *go_on]
    lines += [
        f"slow: rank {one.rank} on {one.node}, {one.times:.2f} times the median rank" for one in result.slow_ranks
    ]
    lines += [f"warning: {warning}" for warning in result.warnings]
    lines.append(f"run folder: {paths.run}")
    return "\n".join([*lines, f"exit code: {result.exit_code}"] if result.cause else lines)


def next_command(paths: RunPaths) -> str:
    """The command that starts the next attempt of a run."""
    run = shlex.quote(str(paths.run))
    if not Attempt_(Run(paths.run), paths.attempt).job:
        return f"the same command with --run={run}"
    return f"dray submit --run={run}  # or sbatch slurm/multinode.sh with the same --run"


def _ended(result: Result, paths: RunPaths, again: str, shown: int | None) -> list[str]:
    if result.cause:
        cause = result.cause
        lines = [f"failed: {who(cause)}: {cause.why}"]
        known = cause.why.splitlines()
        last = [] if cause.rank is not None and cause.rank == shown else cause.last_lines[-12:]
        lines += [f"  | {line}" for line in last if line not in known]
        lines += [f"  log: {cause.log}"] if cause.log else []
        lines += named(cause)
        if names := result.failing_nodes:
            listed = f"{' '.join(names[:_SHOWN])}{' ...' * bool(names[_SHOWN:])}"
            file = shlex.quote(str(paths.failing_nodes))
            lines += [f'failing nodes: {listed} (sbatch --exclude="$(cat {file})")']
        return [*lines, *left(result, again)] if result.checkpoint else lines
    return _stopped(result, again) if result.status == "stopped" else _done(result)


def named(cause: Cause) -> list[str]:
    """The cause's name, and its fix unless the message has its own."""
    if cause.name == UNKNOWN:
        return []
    own = any(line.startswith("  fix:") for line in cause.why.splitlines() + cause.last_lines)
    return [f"  cause: {cause.name}", *([] if own or not cause.fix else [f"  fix: {cause.fix}"])]


def who(cause: Cause) -> str:
    """The rank or node that failed."""
    rank = f"rank {cause.rank}" if cause.rank is not None else "the launch"
    return f"{rank}{' on ' + cause.node if cause.node else ''}"


def restarts(result: Result) -> list[str]:
    """How often all ranks restarted, and the first reason."""
    if not result.restarts:
        return []
    first = result.restart_cause
    why = f", first after {who(first)}: {first.why.partition(chr(10))[0]}" if first else ""
    return [f"restarts: {result.restarts}{why}"]


def comes_next(result: Result) -> list[str]:
    """Whether the job continues by itself, as a line."""
    if not result.next:
        return []
    without = f", without {' '.join(result.next.exclude)}" if result.next.exclude else ""
    if result.next.spare:
        return [f"{result.next.why}{without}"]
    return [f"requeue: {'' if result.next.requeue else 'no; '}{result.next.why}{without}"]


def _done(result: Result) -> list[str]:
    head = counted(result.steps, "step") if result.steps else "exit code 0"
    if result.steps and result.first_step == result.steps:
        head = f"nothing left to do: step {result.first_step} of {result.steps}"
    figures = []
    if result.loss_first is not None and result.loss_last is not None:
        figures.append(f"loss {result.loss_first:.3f} -> {result.loss_last:.3f}")
    if result.perplexity is not None:
        figures.append(f"perplexity {result.perplexity:.2f}")
    if result.tokens_per_s:
        figures.append(f"{result.tokens_per_s:,.0f} tokens/s")
    if result.hosts and result.world_size:
        figures.append(f"{counted(result.world_size, 'rank')} on {' '.join(result.hosts)}")
    lines = ["done: " + ", ".join([head, *figures])]
    lines += [f"preflight: {result.preflight}"] if result.preflight else []
    return [*lines, f"sample: {result.sample}"] if result.sample else lines


def _stopped(result: Result, again: str) -> list[str]:
    """What stopped the run, how far it came, what is saved, and how to resume."""
    reached = f", after step {result.steps}" if result.steps else ", before the first step was logged"
    return [f"stopped by {result.reason} at {result.at}{'' if result.command else reached}", *left(result, again)]


def left(result: Result, again: str) -> list[str]:
    """What is saved, and how to resume."""
    if result.checkpoint:
        step = result.checkpoint.rpartition("-")[2]
        return [f"  safe:   all up to step {step}, in {result.checkpoint}", f"  resume: {again}"]
    own, none = "what the command itself saved", "nothing yet; checkpoint.every=N saves every N steps"
    return [f"  safe:   {own if result.command else none}", f"  again:  {again}"]
