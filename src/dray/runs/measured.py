"""What a short run measured for a setting: step time after the warm-up, memory and losses, or why it failed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from dray.contract import exit_codes, files
from dray.runs.metrics import Event, Metrics, number
from dray.runs.result import Result, result_of
from dray.runs.store import RunPaths, attempts

DONE, LEFT_OUT, REFUSED, DIFFER, HANGS, FAILED = "done", "left out", "refused", "losses differ", "hangs", "failed"
_LETTERS = 300


class Row(BaseModel):
    """One candidate and its result."""

    model_config = ConfigDict(frozen=True)

    values: dict[str, str | int | bool]
    state: str
    why: str = ""
    run: str = ""
    """The name of its run folder; empty if it was not started."""
    step_s: float | None = Field(default=None, gt=0)
    """Median step time after the warm-up."""
    spread: float = Field(default=0.0, ge=0)
    """Median deviation from that median, relative to it."""
    tokens_per_s: float | None = None
    """Speed of all ranks at that step time."""
    memory_gb: float | None = None
    """Peak memory of rank 0."""
    losses: list[float] = []
    """Loss of each step, with the warm-up."""


def of_run(run: Path, code: int, log: Path, *, warm_up: int) -> Row:
    """The row of a run that ended; `log` is everything that it printed."""
    found = attempts(run)
    if not found:
        return Row(values={}, state=REFUSED if code == exit_codes.CONFIG else FAILED, why=_printed(log, code))
    paths = RunPaths(run, found[-1])
    result = result_of(paths)
    if code or result is None or result.status != "done":
        return Row(values={}, state=FAILED, why=_why(result) or _printed(log, code))
    steps: list[Event] = []
    with suppress(OSError):
        steps = [event for event in Metrics(paths.metrics) if event.get("event") == "step"]
    losses = [loss for event in steps if (loss := number(event, "loss")) is not None]
    measured = [event for event in steps[warm_up:] if (number(event, "step_s") or 0) > 0]
    if len(losses) != len(steps):
        return Row(values={}, state=FAILED, why="the loss of a step is not a number")
    if not measured:
        return Row(values={}, state=FAILED, why=f"the metrics have no step after the first {warm_up}")
    seconds = [event["step_s"] for event in measured]
    step_s, tokens = statistics.median(seconds), statistics.median(e["tokens_per_s"] * e["step_s"] for e in measured)
    return Row(
        values={},
        state=DONE,
        step_s=step_s,
        spread=spread(seconds),
        tokens_per_s=tokens / step_s,
        memory_gb=max((number(event, "memory_gb") or 0.0 for event in steps), default=None),
        losses=losses,
    )


def spread(seconds: Sequence[float]) -> float:
    """Median deviation from the median, relative to it; one slow step in ten does not change it."""
    middle = statistics.median(seconds)
    return statistics.median(abs(one - middle) for one in seconds) / middle


def _why(result: Result | None) -> str:
    if result is None or result.cause is None:
        return result.reason or "" if result else ""
    cause, line = result.cause, result.cause.why.partition("\n")[0]
    return (f"{line} ({cause.name})" if cause.name != "unknown" else line)[:_LETTERS]


def _printed(log: Path, code: int) -> str:
    """The refusal that the run printed, or its last line."""
    lines = [line for line in files.tail(log, 60) if line.strip()]
    refused = [number for number, line in enumerate(lines) if line.startswith("dray: ")]
    if not refused:
        return (lines[-1].strip() if lines else f"exit code {code}")[:_LETTERS]
    first, *rest = lines[refused[-1] :]
    details = [line.strip() for line in rest if line.startswith(("  found:", "  wanted:"))]
    return "; ".join([first.removeprefix("dray: "), *details])[:_LETTERS]
