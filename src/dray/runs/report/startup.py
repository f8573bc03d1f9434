"""How long each part of a start-up took, from the times in an attempt's files."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dray.contract import files, run_folder
from dray.contract.startup import NAMES
from dray.planning.schema import Plan
from dray.runs.metrics import Event, number
from dray.runs.paths import RunPaths

_LIMIT = 1 << 16


@dataclass(frozen=True)
class Part:
    """One part of the start-up, or several that were not measured separately."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


def times(paths: RunPaths) -> dict[str, float]:
    """Times from the first node's rendezvous.json: runner started, all nodes joined, ranks launched."""
    told: Any = None
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(files.read(paths.folder / run_folder.RENDEZVOUS, limit=_LIMIT))
    found = told.get("times") if isinstance(told, dict) else None
    return {
        name: seconds
        for name in ("runner", "met", "launched")
        if isinstance(found, dict) and (seconds := number(found, name))
    }


def measured(found: dict[str, float], *, planned: float, first: Event | None) -> tuple[Part, ...]:
    """The parts in order with their measured durations, up to the first step if there is one.

    Their positions in time are only for the drawing.
    """
    rest = {name: seconds for name, seconds in found.items() if name != "queue"}
    end = number(first or {}, "time") or planned + sum(rest.values())
    since = end - sum(rest.values())
    queue = found.get("queue")
    made = [Part("queue", since - queue, since)] if queue is not None else []
    for name, seconds in rest.items():
        made.append(Part(NAMES[name], since, since + seconds))
        since += seconds
    return tuple(made)


def parts(
    plan: Plan | None,
    clocks: dict[str, float],
    *,
    queued: float,
    planned: float,
    start: Event | None,
    first: Event | None,
    usual: float,
) -> tuple[Part, ...]:
    """The parts in order, from the queue to the first step of an attempt.

    `queued` and `planned` are the times of submission and plan, 0 if unknown; `usual` is the median step.
    """
    start, first = start or {}, first or {}
    began, built = number(start, "imported") or 0.0, number(start, "time") or 0.0
    reached = number(first, "time") or 0.0
    checked = bool(plan and plan.preflight)
    compiles = bool(plan and plan.recipe.train and plan.recipe.train.compile)
    moments = [
        ("queue", planned if queued else 0.0),
        ("image staged" if plan and plan.stage else "", 0.0),
        ("container", clocks.get("runner", 0.0)),
        ("rendezvous", clocks.get("met", 0.0)),
        ("preflight" if checked else "", clocks.get("launched", 0.0)),
        ("launcher and imports", began),
        ("datasets and model", built - (number(start, "load_s") or 0.0) if built else 0.0),
        ("checkpoint", built),
        ("compile" if compiles else "", reached - usual if compiles and reached and usual else 0.0),
        ("first step", reached),
    ]
    return tuple(_joined(moments, queued or planned))


def _joined(moments: list[tuple[str, float]], since: float) -> list[Part]:
    """Join a part without its own time with the next part."""
    found: list[Part] = []
    names: list[str] = []
    for name, time in moments:
        if name and not (name == "queue" and not time):
            names.append(name)
        if since and time >= since and names:
            found.append(Part(", ".join(names), since, time))
        elif not time or names:
            continue
        since, names = max(since, time), []
    return found
