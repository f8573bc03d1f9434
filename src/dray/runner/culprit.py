"""Finds the rank that holds up the others: it is not in the collective in which they wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from dray.contract.findings import counted

Item = TypeVar("Item")

_SHOWN = 3  # innermost frames
_WRAPPERS = ("wrapper (", "wrapped (")
_C10D, _TORCHS = "torch/distributed/distributed_c10d.py:", ("torch/distributed/", "torch/nn/parallel/")
_STATES = {"stopped": "is stopped (SIGSTOP)", "unseen": "was not seen: its node did not answer", "ended": "has ended"}


class Entered(NamedTuple):
    """The last collective that a rank entered in a process group, by torch's Flight Recorder."""

    group: str
    number: int
    name: str
    waits: bool = False
    """Whether the collective has not ended."""
    backend: str = ""


class Seen(NamedTuple):
    """What is known of a rank that hangs, or waits for one that does."""

    rank: int
    node: str = ""
    step: int = -1
    """-1 if its program has no heartbeat."""
    phase: str = ""
    state: str = ""
    """runs, sleeps, stopped, ended or unseen; empty if unknown."""
    frames: tuple[str, ...] = ()
    """The frames of its main thread, innermost first: `FUNCTION (FILE:LINE)`."""
    flight: tuple[Entered, ...] = ()
    """Its last collective in each process group."""

    @property
    def waits(self) -> str:
        """The collective in which the rank waits, by its stack; empty if that shows none."""
        innermost = "".join(self.frames[:1])
        if any(folder in innermost for folder in _TORCHS):
            collectives = [frame for frame in self.frames if _C10D in frame and not frame.startswith(_WRAPPERS)]
            return (collectives or self.frames)[0].partition(" ")[0]
        backward = innermost.startswith("_engine_run_backward ") and self.state == "sleeps"
        return "the backward pass" if backward else ""

    @property
    def place(self) -> str:
        """The rank's step, phase and innermost frames, in words."""
        parts = [f"at step {self.step}"] if self.step >= 0 else []
        if self.phase not in ("", "step"):
            parts.append(f"in phase {self.phase}")
        if frames := [frame for frame in self.frames if not frame.startswith(_WRAPPERS)]:
            parts.append(f"in {', called by '.join(frames[:_SHOWN])}")
        return ", ".join(parts)


def culprit(seen: list[Seen]) -> tuple[Seen | None, str]:
    """The rank that holds up the others, and how it differs; None if no rank differs."""
    for difference, ranks in _differences(seen):
        if 0 < len(ranks) < max(2, len(seen)):  # a rank without others holds up itself
            return ranks[0], _sentence(difference, ranks[0], seen)
    return None, _sentence("no rank differs from the others", seen[0], seen)


def _differences(seen: list[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    """What may tell ranks from the others, the surest first, and the ranks of which it is true."""
    for state, what in _STATES.items():
        yield what, [rank for rank in seen if rank.state == state]
    yield from _by_flight(seen)
    steps = grouped((rank for rank in seen if rank.step >= 0), lambda rank: rank.step)
    if len(steps) > 1:
        yield f"is behind the others, which are at step {max(steps)}", steps[min(steps)]
    yield "waits in no collective", [rank for rank in seen if not rank.waits]
    yield "waits in another collective", _rarest(seen, lambda rank: rank.waits)
    yield "runs, and the others sleep", [rank for rank in seen if rank.state == "runs"]
    yield "is at another place than the others", _rarest(seen, lambda rank: rank.frames[:1])


def _by_flight(seen: list[Seen]) -> Iterator[tuple[str, list[Seen]]]:
    """The ranks that have not entered a collective in which others of its group wait, or have entered another.

    A group may have two backends, such as nccl and gloo, and each of them numbers its own collectives.
    """
    flights = [(rank, entry) for rank in seen for entry in rank.flight]
    for (group, _), entered in grouped(flights, lambda flight: (flight[1].group, flight[1].backend)).items():
        kinds = grouped(entered, lambda flight: (flight[1].number, flight[1].name))
        number, name = min(reversed(kinds), key=lambda kind: (kind[0], len(kinds[kind])))
        waiting = [entry for _, entry in entered if entry.waits and (entry.number, entry.name) != (number, name)]
        if waiting:
            last = max(waiting, key=lambda entry: entry.number)
            where = f"collective {number} of group {group}, and others {last.name}, collective {last.number}"
            yield f"has last entered {name}, {where}", [rank for rank, _ in kinds[number, name]]


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """The items by this key."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _rarest(seen: list[Seen], key: Callable[[Seen], object]) -> list[Seen]:
    """The ranks with the rarest value; of two equally rare values, the later ranks."""
    return min(reversed(grouped(seen, key).values()), key=len)


def _sentence(difference: str, shown: Seen, seen: list[Seen]) -> str:
    """The difference with the place of the rank, and where ranks wait."""
    text = f"{difference}: {shown.place}".removesuffix(": ")
    for collective, count in Counter(rank.waits for rank in seen if rank.waits).most_common(2):
        text += f"; waiting in {collective}: {counted(count, 'rank')}"
    return text
