"""What an attempt measured: metrics.jsonl, the parts of its start, and its cost. Nothing is estimated.

A file may be half-written, damaged or missing. The schema of metrics.jsonl: docs/reference/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic_core import from_json

from dray.contract import files
from dray.contract.findings import counted, measured
from dray.contract.node_start import NAMES, SBCAST, STAGE, TFLOPS, valid_parts
from dray.runs import slurm
from dray.runs.store import Attempt, Run, RunPaths, dig, read_json

if TYPE_CHECKING:
    from dray.planning.schema import Plan

Event = dict[str, Any]
LONGEST = 1 << 20
"""Bytes of a line: a step of thousands of nodes makes a very long one."""
_TAIL = 1 << 16


class Metrics:
    """The events of one attempt in order, without an unfinished last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damaged = 0

    def __iter__(self) -> Iterator[Event]:
        self._damaged = 0
        with suppress(FileNotFoundError), files.open_regular(self._path) as file:
            while line := file.readline(LONGEST):
                if event := parsed(line):
                    yield event
                else:
                    self._damaged += line.endswith(b"\n") or len(line) == LONGEST

    def warnings(self) -> list[str]:
        """Warnings about damaged lines in the last read."""
        return [f"{self._path}: {counted(self._damaged, 'damaged line')} left out"] if self._damaged else []


def tail(path: Path, least: int = _TAIL) -> list[Event]:
    """The events of the file's last bytes, of more if there is no step in them. OSError: it cannot be read."""
    events: list[Event] = []
    with suppress(FileNotFoundError):
        for size in (least, _TAIL + LONGEST):
            end, whole = files.end(path, size)
            lines = end.split(b"\n")[0 if whole else 1 :]
            events = [event for event in map(parsed, lines) if event]
            if whole or any(event.get("event") == "step" for event in events):
                break
    return events


def first(path: Path) -> Event:
    """The first event of the file."""
    return next(iter(Metrics(path)), {})


def parsed(line: bytes) -> Event | None:
    """The event of a line; None if it is damaged."""
    try:
        event = from_json(line)  # pydantic's parser is three times as fast as json's, and its floats are bit-identical
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def whole(event: object, name: str) -> int | None:
    """The value as a count; None if it is none."""
    value = dig(event, name)
    return int(value) if isinstance(value, int) and 0 <= value < 1 << 62 else None


def number(event: object, name: str) -> float | None:
    """The value as a finite number; None if it is none."""
    value = event.get(name) if isinstance(event, dict) else None
    return float(value) if isinstance(value, (float, int)) and -1e300 < value < 1e300 else None


_UNSAVED = {"checkpoint": "not saved", "mirror": "not copied"}
WARNED_OF = (*_UNSAVED, "divergence")
"""The kinds of events that `result_warnings` reads."""


def result_warnings(events: Sequence[Event]) -> list[str]:
    """Warnings in metrics: each kind of failed save, and the first loss jumps."""
    found = []
    for kind, what in _UNSAVED.items():
        saves = [event for event in events if event.get("event") == kind]
        failed = [event for event in saves if event.get("saved") is False]
        if failed:
            first_one = f"the first of step {failed[0].get('checkpoint')}: {failed[0].get('why')}"
            mended = "; the last one was saved" if saves[-1].get("saved") is True else ""
            found.append(f"{counted(len(failed), 'checkpoint')} {what}, {first_one}{mended}")
    jumps = [str(event.get("why")) for event in events if event.get("event") == "divergence"]
    return found + jumps[:5]


# The start -----------------------------------------------------------------------------------------------------------


class Slowest(BaseModel):
    """The node with the slowest GPU."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    node: str
    """The node's name."""
    s: float
    """The value measured there."""


class Startup(BaseModel):
    """The measured parts of the start; a missing part was not measured or did not happen."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    parts: dict[str, float]
    """Seconds of the run as a whole: the queue by Slurm's clock, the rest by the first node's clock. Waiting for other
    nodes is part of `rendezvous`, `preflight`, `process_groups`, `model` and `first_step`."""
    nodes: dict[str, dict[str, float]] = {}
    """The parts of each node."""
    tflops: Slowest | None = None
    """TFLOP/s of the slowest GPU in 16-bit matrix products, before the launch."""


def read_startup(paths: RunPaths, names: Sequence[str], queue_s: float | None = None) -> Startup | None:
    """The start-up of an attempt with these nodes, finished or not; None if nothing was measured."""
    told = dig(read_json(paths.startup, []), "nodes")
    rows = [valid_parts(row) for row in told] if isinstance(told, list) else []
    if rows and SBCAST in rows[0]:
        rows[0][STAGE] = round(rows[0].get(STAGE, 0.0) + rows[0][SBCAST], 3)
    speeds = [(row[TFLOPS], name) for name, row in zip(names, rows, strict=False) if TFLOPS in row]
    nodes = {name: _startup_parts(row) for name, row in zip(names, rows, strict=False) if row}
    parts = _startup_parts(rows[0]) if rows else {}
    if queue_s is not None:
        parts = {"queue": queue_s, **parts}
    if not parts and not nodes:
        return None
    slowest = Slowest(node=min(speeds)[1], s=min(speeds)[0]) if speeds else None
    return Startup(parts=parts, nodes=nodes, tflops=slowest)


def _startup_parts(row: dict[str, float]) -> dict[str, float]:
    return {part: seconds for part, seconds in row.items() if part in NAMES}


def startup_text(startup: Startup) -> str:
    """The parts of the whole run's start in one line."""
    return "start-up: " + ", ".join(f"{NAMES.get(part, part)} {measured(s)}" for part, s in startup.parts.items())


# The cost ------------------------------------------------------------------------------------------------------------


class Cost(BaseModel):
    """The cost of one attempt."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    seconds: NonNegativeFloat
    """Seconds from planning to end, by one clock."""
    nodes: PositiveInt
    """All nodes of the job, spare nodes too."""
    gpus: NonNegativeInt = 0
    """GPUs on all nodes."""


class Spent(BaseModel):
    """The cost of all attempts."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    node_hours: float
    """Nodes times hours."""
    gpu_hours: float | None = None
    """GPUs times hours; None if the job had no GPUs."""
    unknown: list[int] = []
    """Attempts whose cost was not recorded; the figures do not include them."""


def cost_here(paths: RunPaths, plan: Plan, seconds: float) -> Cost:
    """The cost of an attempt without Slurm: one node, whatever number of nodes the plan has."""
    per_node = Attempt(Run(paths.run), paths.attempt).facts.get("gpus_per_node", "")
    gpus = int(per_node) * len(plan.world.nodes) if per_node.isdecimal() and plan.variant != "cpu" else 0
    return Cost(seconds=round(seconds, 1), nodes=1, gpus=gpus)


def cost_of_job(known: str) -> Cost | None:
    """The cost from `begun_s=S ended_s=S allocated_nodes=N allocated_gpus=N` of the job's script."""
    fields = slurm.fields(known)
    try:
        seconds = float(fields["ended_s"]) - float(fields["begun_s"])
        nodes = int(fields["allocated_nodes"])
        gpus = int(fields.get("allocated_gpus", "0"))
        return Cost(seconds=round(seconds, 1), nodes=nodes, gpus=nodes * gpus)
    except (KeyError, ValueError):  # pydantic's ValidationError is a ValueError
        return None


def queue_s(known: str) -> float | None:
    """Seconds from submission to start, by Slurm's clock; only for the first attempt of a batch job."""
    fields = slurm.fields(known)
    if "first_of_job" not in fields or not slurm.is_batch(fields):
        return None
    with suppress(KeyError, ValueError):
        started, submitted = (datetime.fromisoformat(fields[name]) for name in ("StartTime", "SubmitTime"))
        return max(0.0, (started - submitted).total_seconds())  # negative if a clock was set
    return None


def sum_costs(attempts: Sequence[tuple[int, Cost | None]]) -> Spent | None:
    """The sum over attempts, each with its number; None if no cost is known."""
    known = [cost for _, cost in attempts if cost]
    if not known:
        return None
    gpu_hours = sum(cost.seconds * cost.gpus for cost in known) / 3600
    return Spent(
        node_hours=round(sum(cost.seconds * cost.nodes for cost in known) / 3600, 4),
        gpu_hours=round(gpu_hours, 4) or None,
        unknown=[number for number, cost in attempts if cost is None],
    )


def cost_text(found: Spent | None) -> str:
    """`12.34 GPU-h`, after a `>` if an attempt's cost is unknown; node-h without GPUs; empty if no cost is known."""
    if found is None:
        return ""
    more = ">" if found.unknown else ""
    if found.gpu_hours is None:
        return f"{more}{found.node_hours:,.2f} node-h"
    return f"{more}{found.gpu_hours:,.2f} GPU-h"
