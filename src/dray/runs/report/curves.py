"""The metrics of a run's attempts as curves, joined at each resume and reduced for a page."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dray.runs.metrics import Event, number, whole
from dray.runs.report.document import Point

MOST = 2000
"""The most points of a curve in a report."""
_EVENTS = 500  # of each kind that is kept
_EVALS = 50_000  # of each dataset
_NODES = 4096
COLUMNS = ("loss", "lr", "tokens_per_s", "mfu", "step_s", "data_s", "checkpoint_s", "memory_gb")
_NONE = float("nan")


@dataclass
class Trace:
    """One column of numbers for each key of a `step` event. A repeated step has its last numbers."""

    columns: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in ("step", "time", *COLUMNS)}
    )
    again: int = 0
    """The number of steps repeated after a resume."""
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("data_s", "checkpoint_s"), 0.0))
    """Total seconds, with repeated steps."""
    evals: dict[str, dict[int, Event]] = field(default_factory=dict)
    """Evaluations by dataset and step."""
    events: list[Event] = field(default_factory=list)
    """Starts, checkpoints, slow ranks, divergences and ends, each with its `attempt`."""
    counted: Counter[str] = field(default_factory=Counter)
    nodes: dict[str, array[float]] = field(default_factory=dict)
    """Each node's own seconds per step, by name."""

    steps: dict[int, tuple[Event, Event]] = field(default_factory=dict)
    """The first and the last step of each attempt."""

    def read(self, attempt: int, events: Iterable[Event]) -> None:
        """Add the events of an attempt."""
        hosts: list[str] = []
        for event in events:
            kind = event.get("event")
            if kind == "step":
                self._step(event, attempt)
                self._own(event, hosts)
            elif isinstance(kind, str) and "loss" in event and (step := whole(event, "step")) is not None:
                of_one = self.evals.setdefault(kind[:200], {}) if len(self.evals) < _EVENTS else {}
                if len(of_one) < _EVALS:
                    of_one[step] = {name: event.get(name) for name in ("loss", "perplexity", "accuracy")}
            elif isinstance(kind, str):
                if kind == "start":
                    hosts = _hosts(event)
                self.counted[kind[:200]] += 1
                if self.counted[kind[:200]] <= _EVENTS:
                    self.events.append({**event, "attempt": attempt})

    def _step(self, event: Event, attempt: int) -> None:
        step = whole(event, "step")
        if step is None:
            return
        self.steps[attempt] = (self.steps.get(attempt, (event,))[0], event)
        steps = self.columns["step"]
        while steps and steps[-1] >= step:
            self.again += 1
            for column in self.columns.values():
                column.pop()
        steps.append(step)
        for name in ("time", *COLUMNS):
            value = number(event, name)
            self.columns[name].append(_NONE if value is None else value)
            if name in self.spent:
                self.spent[name] += max(0.0, value or 0.0)

    def _own(self, event: Event, hosts: list[str]) -> None:
        own = event.get("node_s")
        if isinstance(own, list) and len(own) == len(hosts):
            for host, seconds in zip(hosts, own, strict=True):
                if isinstance(seconds, float | int) and 0 < seconds < 1e9:
                    self.nodes.setdefault(host, array("d")).append(seconds)

    def points(self, name: str) -> list[Point]:
        """The steps at which the column has a number, with that number."""
        return [(x, y) for x, y in zip(self.columns["step"], self.columns[name], strict=True) if y == y]  # noqa: PLR0124  not NaN

    def values(self, name: str) -> list[float]:
        """The numbers of a column."""
        return [value for value in self.columns[name] if value == value]  # noqa: PLR0124  not NaN

    def median(self, name: str) -> float | None:
        """The median of a column."""
        return statistics.median(values) if (values := self.values(name)) else None

    def of(self, kind: str, attempt: int | None = None) -> list[Event]:
        """The events of a kind."""
        return [one for one in self.events if one.get("event") == kind and attempt in (None, one["attempt"])]


def _hosts(event: Event) -> list[str]:
    hosts: Any = event.get("hosts")
    known = hosts if isinstance(hosts, list) else []
    return list(dict.fromkeys(host[:200] for host in known[: _NODES * 16] if isinstance(host, str)))[:_NODES]


def reduced(points: list[Point], most: int = MOST) -> tuple[Point, ...]:
    """At most `most` points: from equal parts of the curve the lowest and the highest value, so that peaks remain."""
    if len(points) <= most:
        return tuple(points)
    parts = most // 2 - 1
    edges = [1 + (len(points) - 2) * part // parts for part in range(parts + 1)]
    return (points[0], *_extremes(points, edges), points[-1])


def _extremes(points: list[Point], edges: list[int]) -> Iterator[Point]:
    for begin, end in pairwise(edges):
        part = points[begin:end]
        least, greatest = (choose(part, key=lambda point: point[1]) for choose in (min, max))
        yield from sorted({least, greatest})
