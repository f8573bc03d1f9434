"""What the runners of a run tell one another: a class for each message, one encoder and one decoder.

Messages come over connections which have proved the run's secret, from this same program: their fields are believed.
They are named tuples, since the import of dataclasses would double the time of the runner's start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from dray.contract.findings import Finding
from dray.runner.culprit import Entered, Seen
from dray.runner.heartbeats import Late

Message = tuple[Any, ...]


class BrokenError(OSError):
    """The peer is gone, or has sent something invalid."""


class _Reason(NamedTuple):
    """A message with a finding."""

    finding: Finding


class Hello(NamedTuple):
    """A node's first message: who it is, what all nodes must hold alike, and why its own check found it unfit."""

    node: int
    name: str
    plan: str
    dray: str
    image: str
    unfit: str
    time: float


class Welcome(NamedTuple):
    """All nodes have come, and may start."""


class Refusal(_Reason):
    """Why no node may start."""


class Signal(NamedTuple):
    """A node has got this signal, which all nodes obey."""

    number: int


class Failed(_Reason):
    """Why the run fails."""


class Progress(NamedTuple):
    """The ranks of a node have made progress so many seconds ago."""

    ago: float


class Hung(_Reason):
    """The run hangs: all nodes save what their ranks do."""


class StartTimes(NamedTuple):
    """How long each part of a node's start took."""

    parts: dict[str, float]


class Report(NamedTuple):
    """How far a rank has come in the preflight."""

    rank: int
    node: str
    log: str
    part: str
    phase: str = "its start"
    order: int = -1
    """The number of its phase."""
    time: float = 0.0
    """When it began the phase."""
    limit: int = 0
    findings: tuple[Finding, ...] = ()
    why: str = ""
    end: str = ""
    """passed, killed, crashed, expired or stuck."""
    ready: bool = False
    tflops: float = 0.0


class Reports(NamedTuple):
    """How far a node's ranks have come in the preflight: a report of each rank, or none if all have passed."""

    reports: tuple[Report, ...]


class Idle(NamedTuple):
    """The launcher of a node has ended; can the node start its ranks again?"""

    can_restart: bool = True
    saved: Finding | None = None
    """That its ranks have saved and ended, as they were asked to."""


class Restart(NamedTuple):
    """A start of all ranks, with a store of its own at this port of the first node; number 0 is the first start."""

    number: int = 0
    port: int = 0
    cause: Finding | None = None
    """Why the ranks before have ended."""


class Ended(NamedTuple):
    """A node's last message: it has ended by itself, and was not lost."""


_KINDS: dict[str, Callable[..., object]] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Welcome, Refusal, Signal, Failed, Progress, Late, Hung, StartTimes, Report, Reports),
        *(Idle, Restart, Ended, Finding, Seen, Entered),
    )
}


def encode(message: Message) -> bytes:
    """The message as a line of JSON; each named tuple in it is an object, `{NAME: [FIELD, ...]}`."""
    return json.dumps(_named(message)).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line. BrokenError: it is none."""
    try:
        message: Message = json.loads(line, object_hook=_built)
    except (ValueError, TypeError) as error:
        raise BrokenError(f"malformed message: {error}") from error
    return message


def _named(value: object) -> object:
    if isinstance(value, tuple | list):
        fields = [_named(field) for field in value]
        return {type(value).__name__: fields} if hasattr(value, "_fields") else fields
    return value


def _built(fields: dict[str, Any]) -> object:
    for name, values in fields.items():
        if name in _KINDS:
            return _KINDS[name](*(tuple(value) if isinstance(value, list) else value for value in values))
    return fields
