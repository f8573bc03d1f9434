"""How a run ended: result.json from what the nodes and ranks left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dray.contract.files import write_atomic
from dray.contract.findings import counted
from dray.planning.schema import Plan
from dray.runs.paths import RunPaths
from dray.runs.stop import Stop, utc
from dray.runs.write import read


class Cause(BaseModel):
    """Why a run failed: the first node or rank that died by itself."""

    model_config = ConfigDict(frozen=True)

    node: str
    rank: int | None
    code: int
    why: str
    log: str | None
    last_lines: list[str]


class Result(BaseModel):
    """How a run ended."""

    model_config = ConfigDict(frozen=True)

    run: str
    status: str
    exit_code: int
    finished: str
    world_size: int
    hosts: list[str]
    steps: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    perplexity: float | None = None
    tokens_per_s: float | None = None
    train_seconds: float | None = None
    sample: str | None = None
    preflight: str | None = None
    cause: Cause | None = None
    reason: str | None = None
    """What stopped it."""
    at: str | None = None
    """When it was stopped."""
    checkpoint: str | None = None
    """The newest checkpoint of a run that was stopped or failed."""


def finish(paths: RunPaths, *, code: int, stopped: Stop | None = None) -> Result:
    """Write result.json. `code` is what starting the nodes ended with; the first cause's own code wins over it."""
    plan = read(paths)
    status = "stopped" if stopped else "failed" if code else "done"
    # Ranks that were stopped may die in any way; none of them is a cause.
    cause = (_first_cause(paths) or _unrecorded(paths, code)) if status == "failed" else None
    result = Result(
        run=plan.run,
        status=status,
        exit_code=cause.code if cause else code,
        finished=utc(),
        world_size=plan.world.size,
        hosts=[node.name for node in plan.world.nodes],
        cause=cause,
        reason=stopped.reason if stopped else None,
        at=stopped.at if stopped else None,
        checkpoint=_newest_checkpoint(plan, paths) if status != "done" else None,
        preflight=_preflight(paths),
        **_figures(paths.metrics),
    )
    if status == "done":
        _tidy(paths)
    write_atomic(paths.result, result.model_dump_json(indent=1) + "\n")
    return result


def _newest_checkpoint(plan: Plan, paths: RunPaths) -> str | None:
    """A checkpoint gets its name when it is complete."""
    folder = Path(plan.recipe.checkpoint.folder or paths.checkpoints)
    steps = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return str(folder / f"step-{max(steps)}") if steps else None


def _preflight(paths: RunPaths) -> str | None:
    """What the nodes proved before the launch, in a line."""
    try:
        report = json.loads(paths.preflight_report.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there was none, or the disk was full
        return None
    transports = " and ".join(sorted({rank["transport"] for rank in report["ranks"]}))
    best = max((row["bus_gb_s"] for row in report["sweep"]), default=0.0)
    return f"{transports}, {best:.2f} GB/s of bus bandwidth, in {sum(report['seconds'].values()):.1f} s"


def _tidy(paths: RunPaths) -> None:
    """What ranks told one another in the preflight is of use only where it failed."""
    empty = (log for log in paths.logs.glob("preflight-*.log") if not log.stat().st_size)
    for left in (*paths.preflight.glob("rank-*"), *empty):
        left.unlink()


def _first_cause(paths: RunPaths) -> Cause | None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths.failures.glob("*.json")]
    if not records:
        return None
    return Cause.model_validate(min(records, key=lambda record: record["time"]))


def _unrecorded(paths: RunPaths, code: int) -> Cause:
    logs = sorted(paths.logs.glob("node-*.log"))
    lines = [line for log in logs for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    why = "no rank left a record: the node, the container or the launcher itself failed, or the job was stopped"
    return Cause(node="", rank=None, code=code, why=why, log=str(paths.logs), last_lines=lines[-20:])


def events(metrics: Path) -> list[dict[str, Any]]:
    """The metrics so far; a line that is still being written is left out."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _figures(metrics: Path) -> dict[str, Any]:
    seen = events(metrics)
    steps = [event for event in seen if event["event"] == "step"]
    figures: dict[str, Any] = {}
    if steps:
        figures |= {"steps": steps[-1]["step"], "loss_first": steps[0]["loss"], "loss_last": steps[-1]["loss"]}
    for event in seen:
        if event["event"] == "eval":
            figures["perplexity"] = event["perplexity"]
        if event["event"] == "end":
            figures |= {name: event[name] for name in ("tokens_per_s", "train_seconds", "sample")}
    return figures


def summary(result: Result, paths: RunPaths) -> str:
    """The last words of a run."""
    if result.status == "done":
        figures = [f"loss {result.loss_first:.3f} -> {result.loss_last:.3f}"] if result.loss_last is not None else []
        if result.perplexity is not None:
            figures.append(f"perplexity {result.perplexity:.2f}")
        if result.tokens_per_s is not None:
            figures.append(f"{result.tokens_per_s:,.0f} tokens/s")
        where = f"{counted(result.world_size, 'rank')} on {' '.join(result.hosts)}"
        ended = counted(result.steps, "step") if result.steps else "exit code 0"
        head = ", ".join([f"done: {ended}", *figures, where])
        sample = [f"preflight: {result.preflight}"] if result.preflight else []
        sample += [f"sample: {result.sample}"] if result.sample else []
        return "\n".join([head, *sample, f"run folder: {paths.run}"])
    cause = result.cause
    if cause is None:
        return "\n".join([*_stopped(result, paths), f"run folder: {paths.run}"])
    who = f"rank {cause.rank}" if cause.rank is not None else "the launch"
    lines = [f"failed: {who}{' on ' + cause.node if cause.node else ''}: {cause.why}"]
    lines += [f"  | {line}" for line in cause.last_lines[-12:]]
    lines += [f"  log: {cause.log}"] if cause.log else []
    return "\n".join([*lines, f"run folder: {paths.run}", f"exit code: {result.exit_code}"])


def _stopped(result: Result, paths: RunPaths) -> list[str]:
    """What stopped it, how far it was, and what there is to resume from."""
    reached = f"after step {result.steps}" if result.steps else "before the first step was logged"
    lines = [f"stopped by {result.reason} at {result.at}, {reached}"]
    if result.checkpoint:
        return [*lines, f"  checkpoint: {result.checkpoint}", f"  resume:     the same command with --run={paths.run}"]
    return [*lines, "  checkpoint: none; checkpoint.every in the recipe makes some"]
