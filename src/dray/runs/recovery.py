"""How a run recovered from failures, and how long it took, from the times in its files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict


class Recovery(BaseModel):
    """One failure from which the run recovered. Times are in seconds."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

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


class Next(BaseModel):
    """Whether and why the job is requeued, or continues with other or fewer nodes."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    requeue: bool
    """Whether the job is requeued."""
    spare: bool = False
    """Whether the job continues at once, with spare nodes or with fewer nodes."""
    exclude: list[str] = []
    """Lost or unfit nodes that the next attempt must not use."""
    why: str
    """Why the job continues, or does not."""


class Failure(NamedTuple):
    """What the previous ranks ended with, and when."""

    why: str
    time: float
    ended: float
    """When all of them had ended."""
    began: float | None = None
    """When the next attempt began; None for a restart within the attempt."""


def recoveries(failures: Iterable[Failure], events: Iterable[dict[str, Any]]) -> list[Recovery]:
    """The recoveries after failures (in time order), from the attempts' metrics; only if a step followed."""
    left, found = list(failures), []
    last = start = None
    for event in events:
        kind, time = event.get("event"), event.get("time")
        if not isinstance(time, int | float):
            continue
        if kind == "start":
            while len(left) > 1 and left[1].time < time:  # it failed again before it had started
                left.pop(0)
            start = event if left and left[0].time < time else None
        elif kind == "step" and isinstance(event.get("step"), int):
            if start is not None:
                found.append(_between(left.pop(0), start, event, last))
            last, start = time, None
    return found


def _between(failure: Failure, start: dict[str, Any], step: dict[str, Any], last: float | None) -> Recovery:
    began = failure.ended if failure.began is None else failure.began
    load = start.get("load_s")
    load = float(load) if isinstance(load, int | float) else 0.0
    times = {
        "detect_s": failure.time - (failure.time if last is None else last),
        "stop_s": failure.ended - failure.time,
        "queue_s": began - failure.ended,
        "start_s": start["time"] - began - load,
        "load_s": load,
        "step_s": step["time"] - start["time"],
    }
    return Recovery(why=failure.why, step=step["step"], **{name: round(max(0.0, s), 3) for name, s in times.items()})
