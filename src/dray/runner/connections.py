"""Connections between runners, of which both ends have proved that they hold the run's secret, and their messages.

Before the proof nothing of a peer's is parsed: 64 bytes are compared. Later messages need none, and their fields are
believed: they come from this same program. Each has a class, which is a named tuple, since the import of dataclasses
would double the time of the runner's start.
"""

from __future__ import annotations

import _thread  # threading's import is paid by every start
import hmac
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from dray.contract.findings import Finding
from dray.runner.heartbeats import Late

Message = tuple[Any, ...]

NONCE = 32
_PROOF_S = 5.0  # from connecting to having said who one is; other users and slow ones are closed then
_CHUNK = 1 << 16
_LOOK_S = 0.01
_SEND_S = 5.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 30_000}


class BrokenError(OSError):
    """The peer is gone, or has sent something invalid."""


class Connection:
    """One end; it sends and receives messages."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._data = b""
        line.settimeout(_SEND_S)
        if line.family != socket.AF_UNIX:  # a node that loses its power or its network says nothing
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        """Send a message. OSError: the peer is gone, or does not read; then the connection is over for both."""
        try:
            self.line.sendall(encode(message))
        except OSError:  # perhaps in the middle of a line, to which the next message would be appended
            with suppress(OSError):  # it is closed already
                self.line.shutdown(socket.SHUT_RDWR)
            raise

    def receive(self) -> list[Message]:
        """The messages that have arrived on a readable connection. OSError: it is broken."""
        data = self.line.recv(_CHUNK)
        if not data:
            raise BrokenError("the connection was closed")
        *lines, self._data = (self._data + data).split(b"\n")
        return [decode(line) for line in lines]

    def receive_first(self, deadline: float) -> Message:
        """The first message. Later ones stay in the socket, which so remains readable."""
        line = b""
        while not line.endswith(b"\n"):
            line += _read(self.line, 1, deadline)
        self.line.settimeout(_SEND_S)
        return decode(line)


class Server:
    """The first node's end: the connection and the first message of each guest that has proved the secret."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self.proved: list[tuple[Connection, Message]] = []
        self._listener, self._secret = listener, secret
        listener.settimeout(_LOOK_S)

    def accept(self) -> None:
        """Wait a moment for a guest. Each has a thread: one that says nothing holds up no other."""
        with suppress(OSError, RuntimeError):  # nobody came; or there are too many files or threads for another
            line, _ = self._listener.accept()
            _thread.start_new_thread(self._hear, (line,))

    def _hear(self, line: socket.socket) -> None:
        try:
            connection = greet(line, self._secret, time.monotonic() + _PROOF_S, host=True)
            while not (messages := connection.receive()):
                pass
            self.proved.append((connection, messages[0]))
        except OSError:  # it is gone, slow, or without the secret
            line.close()


def greet(line: socket.socket, secret: bytes, deadline: float, *, host: bool = False) -> Connection:
    """Prove the secret to the other end, and check its proof; the guest, which has connected, proves it first."""
    role, other = (b"host", b"guest") if host else (b"guest", b"host")
    own = os.urandom(NONCE)
    line.sendall(own)
    theirs = _read(line, NONCE, deadline)
    if not host:
        line.sendall(proof(secret, role, theirs, own))
    if not hmac.compare_digest(_read(line, 32, deadline), proof(secret, other, own, theirs)):
        raise PermissionError("the other end does not have this run's secret")
    if host:
        line.sendall(proof(secret, role, theirs, own))
    return Connection(line)


def proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    """What only an end with the secret can send."""
    return hmac.digest(secret, b"".join((b"dray ", role, *nonces)), "sha256")


def _read(line: socket.socket, count: int, deadline: float) -> bytes:
    """Read exactly `count` bytes, all of them before the deadline."""
    data = b""
    while len(data) < count:
        line.settimeout(max(0.001, deadline - time.monotonic()))
        more = line.recv(count - len(data))
        if not more:
            raise BrokenError("the other end closed the connection: it has ended, or does not have this run's secret")
        data += more
    return data


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
