"""The parts of a start-up as a time line."""

from __future__ import annotations

from dataclasses import dataclass

from dray.contract.start_times import NAMES
from dray.runs.metrics import Event, number


@dataclass(frozen=True)
class Part:
    """One part of the start-up."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


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
