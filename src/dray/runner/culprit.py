"""Finds the rank that holds up the others: it is not in the collective in which they wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from dray.contract.findings import counted

_SHOWN = 3  # innermost frames
_C10D, _WRAPPERS = "/torch/distributed/distributed_c10d.py", ("wrapper", "wrapped")
_TORCHS = ("/torch/distributed/", "/torch/nn/parallel/")
_BACKWARD = ("/torch/autograd/graph.py", "_engine_run_backward")
_ENDS = {"stopped": "is stopped (SIGSTOP)", "unseen": "was not seen: its node did not answer", "ended": "has ended"}


class Entered(NamedTuple):
    """The last collective that a rank entered in a process group, by torch's Flight Recorder."""

    group: str
    number: int
    name: str
    waits: bool = False
    """Whether the collective has not ended."""


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
    """The frames of its main thread, innermost first: `FILE:LINE FUNCTION`."""
    flight: tuple[Entered, ...] = ()
    """Its last collective in each process group."""

    @property
    def waits(self) -> str:
        """The collective in which the rank waits, by its stack; empty if that shows none."""
        return _collective(self.frames, self.state)

    @property
    def place(self) -> str:
        """The rank's step, phase and innermost frames, in words."""
        step = f"at step {self.step}" if self.step >= 0 else ""
        phase = f"({self.phase})" if self.phase not in ("", "step") else ""
        parts = (frame.rpartition(" ") for frame in self.frames if not frame.startswith("<"))  # importlib's
        shown = [f"{function} ({_short(at)})" for at, _, function in parts if function not in _WRAPPERS]
        frames = f"in {', called by '.join(shown[:_SHOWN])}" if shown else ""
        return ", ".join(part for part in (f"{step} {phase}".strip(), frames) if part)


@lru_cache(maxsize=4096)
def _collective(frames: tuple[str, ...], state: str) -> str:
    parts = [frame.rpartition(" ") for frame in frames]
    inner: list[tuple[str, str]] = []
    for place, _, function in parts:
        if not any(folder in place for folder in _TORCHS):
            break
        inner.append((place, function))
    named = (function for place, function in inner if _C10D in place and function not in _WRAPPERS)
    if inner:
        return next(named, inner[0][1])
    backward = parts and _BACKWARD[0] in parts[0][0] and parts[0][2] == _BACKWARD[1]
    return "the backward pass" if backward and state == "sleeps" else ""


def culprit(seen: list[Seen]) -> tuple[Seen | None, str]:
    """The rank that holds up the others, and how it differs; None if no rank differs."""
    for state, what in _ENDS.items():
        if found := _few(seen, lambda one, state=state: one.state == state):  # type: ignore[misc]
            return found[0], _told(what, found, seen)
    if by_flight := _by_flight(seen):
        return by_flight
    steps = [one.step for one in seen if one.step >= 0]
    least, most = min(steps, default=0), max(steps, default=0)
    behind = _few(seen, lambda one: one.step == least) if least < most else []
    kinds = (
        (f"is behind the others, which are at step {most}", behind),
        ("waits in no collective", _few(seen, lambda one: not one.waits)),
        ("waits in another collective", _rare(seen, lambda one: one.waits)),
        ("runs, and the others sleep", _few(seen, lambda one: one.state == "runs")),
        ("is at another place than the others", _rare(seen, lambda one: one.frames[:1])),
    )
    for what, found in kinds:
        if found:
            return found[0], _told(what, found, seen)
    return None, _told("no rank differs from the others", seen, seen)


def _by_flight(seen: list[Seen]) -> tuple[Seen, str] | None:
    """The rank that has not entered a collective in which others of its group wait, or has entered another."""
    groups: dict[str, dict[Seen, Entered]] = {}
    for one in seen:
        for entry in one.flight:
            groups.setdefault(entry.group, {})[one] = entry
    for group, entered in groups.items():
        last = max(entered.values(), key=lambda entry: (entry.waits, entry.number))
        if not last.waits:
            continue
        behind = _few(list(entered), lambda one: entered[one].number < last.number)  # noqa: B023  used within the loop
        if behind:
            one = min(behind, key=lambda one: entered[one].number)
            who = f"{counted(in_it := len(entered) - len(behind), 'rank')} wait{'s' * (in_it == 1)}"
            what = f"has not entered {last.name}, collective {last.number} of group {group}, in which {who}"
            return one, _told(what, [one], [])
        if other := _rare(list(entered), lambda one: entered[one].name):  # noqa: B023
            known = {one.rank for one in other}
            names = " or ".join(sorted({entry.name for one, entry in entered.items() if one.rank not in known}))
            what = f"has entered {entered[other[0]].name} as collective {last.number} of group {group}, others {names}"
            return other[0], _told(what, other, seen)
    return None


def _few(seen: list[Seen], which: Callable[[Seen], bool]) -> list[Seen]:
    """The ranks for which it is true, if it is not true for all."""
    found = [one for one in seen if which(one)]
    return found if len(found) < len(seen) else []


def _rare(seen: list[Seen], key: Callable[[Seen], object]) -> list[Seen]:
    """The ranks with the rarest value; of two equally rare values, the later ranks."""
    kinds = Counter(key(one) for one in seen)
    if len(kinds) < 2:
        return []
    rarest = min(reversed(kinds), key=lambda kind: kinds[kind])
    return [one for one in seen if key(one) == rarest]


def _told(what: str, found: list[Seen], seen: list[Seen]) -> str:
    """The sentence with the place of the first of these ranks, and what the others do."""
    others = counted(len(found) - 1, "other rank")
    more = f"; so {'is' if len(found) == 2 else 'are'} {others}" if 1 < len(found) < len(seen) else ""
    named = {one.rank for one in found}
    waits = Counter(one.waits for one in seen if one.rank not in named and one.waits)
    where = " and ".join(f"{counted(count, 'rank')} in {name}" for name, count in waits.most_common(2))
    wait = f"; {where} wait{'s' * (waits.total() == 1)}" if where else ""
    place = found[0].place if found else ""
    return f"{what}{': ' * bool(place)}{place}{more}{wait}"


def _short(place: str) -> str:
    """The path without the folders above a package."""
    return place.rpartition("site-packages/")[2]
