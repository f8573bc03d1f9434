"""Connections between runners, of which both ends have proved that they hold the run's secret.

Before the proof nothing of a peer's is parsed: 64 bytes are compared. Later messages need none.
"""

from __future__ import annotations

import _thread  # threading's import is paid by every start
import hmac
import os
import socket
import time
from contextlib import suppress

from dray.runner.protocol import BrokenError, Message, decode, encode

NONCE = 32
_PROOF_S = 5.0  # from connecting to having said who one is; other users and slow ones are closed then
_CHUNK = 1 << 16
_LOOK_S = 0.01
_SEND_S = 5.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 30_000}


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
