"""Connections between runners, of which both ends have proved that they hold the run's secret.

Before the proof nothing of a peer's is parsed: 64 bytes are compared. Later messages need none.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from contextlib import suppress

from dray.runner.children import Loop
from dray.runner.protocol import BrokenError, Message, decode, encode

NONCE = 32
GREETING = NONCE + 32  # the guest's nonce and its proof
_PROOF_S = 5.0  # from connecting to having said who one is; other users and slow ones are closed then
_PROVED_PER_S = 1000  # nodes that a busy first node proves
_CHUNK = 1 << 16
_AT_ONCE = 128  # accepted between two looks at those that are there
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


def proof_s(nodes: int) -> float:
    """Seconds in which each end must prove the secret: more if thousands of nodes connect at once."""
    return _PROOF_S + nodes / _PROVED_PER_S


def greet(line: socket.socket, secret: bytes, deadline: float) -> Connection:
    """As the guest, which connects: prove the secret, and check the host's proof."""
    theirs, own = _read(line, NONCE, deadline), os.urandom(NONCE)
    line.sendall(own + proof(secret, b"guest", theirs, own))
    if not hmac.compare_digest(_read(line, 32, deadline), proof(secret, b"host", own, theirs)):
        raise BrokenError("the other end does not have this run's secret")
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
            raise BrokenError("the first node closed the connection: it has ended, or does not have this run's secret")
        data += more
    return data


class Guest:
    """A connection that has not yet proved the secret, or not yet said which node it is."""

    def __init__(self, line: socket.socket, deadline: float) -> None:
        line.setblocking(False)
        self.line, self.deadline = line, deadline
        self.nonce, self.data = os.urandom(NONCE), b""
        self.proved = False

    def prove(self, secret: bytes) -> None:
        """Check the proof in the greeting, and send the host's. PermissionError: it holds no secret."""
        theirs, proved = self.data[:NONCE], self.data[NONCE:GREETING]
        if not hmac.compare_digest(proved, proof(secret, b"guest", self.nonce, theirs)):
            raise PermissionError("another run's, or nobody's")
        self.line.sendall(proof(secret, b"host", theirs, self.nonce))
        self.proved = True


class Server:
    """The first node's end: the connection and the first message of each guest that has proved the secret."""

    def __init__(self, listener: socket.socket, secret: bytes, nodes: int) -> None:
        self.turned_away = 0
        self._loop, self._listener, self._secret = Loop(), listener, secret
        self._seconds = proof_s(nodes)
        self._guests: dict[int, Guest] = {}  # in the order of arrival, and so of their deadlines
        self._proved: list[tuple[Connection, Message]] = []
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), self._accept)

    def serve(self, deadline: float) -> list[tuple[Connection, Message]]:
        """Those that have proved the secret, and what they said first, once something has happened."""
        self._proved = []
        if oldest := self._oldest():
            deadline = min(deadline, oldest.deadline)
        self._loop.look(deadline - time.monotonic())
        while (oldest := self._oldest()) and time.monotonic() > oldest.deadline:
            self._forget(oldest).close()
        return self._proved

    def _oldest(self) -> Guest | None:
        return next(iter(self._guests.values()), None)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the table of files is full
                if oldest := self._oldest():
                    self._forget(oldest).close()
                return
            guest = self._guests[line.fileno()] = Guest(line, time.monotonic() + self._seconds)
            self._loop.watch(line.fileno(), lambda guest=guest: self._hear(guest))  # type: ignore[misc]
            with suppress(OSError):  # it is gone, which is read next
                line.send(guest.nonce)

    def _hear(self, guest: Guest) -> None:
        """Read a piece of the greeting, or of the message behind it."""
        try:
            data = guest.line.recv(_CHUNK)
            if not data:
                raise BrokenError("it left")
            guest.data += data
            if not guest.proved and len(guest.data) >= GREETING:
                guest.prove(self._secret)
            message = guest.data[GREETING:]
            if message.endswith(b"\n"):
                self._proved.append((Connection(self._forget(guest)), decode(message)))
        except OSError as error:
            self.turned_away += isinstance(error, PermissionError)
            self._forget(guest).close()

    def _forget(self, guest: Guest) -> socket.socket:
        del self._guests[guest.line.fileno()]
        self._loop.forget(guest.line.fileno())
        return guest.line
