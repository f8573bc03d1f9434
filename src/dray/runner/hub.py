"""Connections between runners, of which both ends have proved that they hold the run's secret.

Before the proof nothing of a peer's is parsed: 64 bytes are compared. Later messages need none.
"""

from __future__ import annotations

import errno
import hmac
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from dray.runner.children import Loop
from dray.runner.protocol import BrokenError, Message, decode, encode

NONCE = 32
GREETING = NONCE + 32  # the guest's nonce and its proof
PROOF_S = 5.0  # from connecting to having said who one is; other users and slow ones are closed then
_CHUNK, _LONGEST = 1 << 16, 1 << 20  # bytes that are read at once, and of a message: the reports of a node's ranks
_PROVED_PER_S = 1000  # nodes that a busy first node proves
_AT_ONCE = 128  # accepted between two looks at those that are there
_SEND_S = 5.0
_FULL_S = 0.05
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

    def receive(self, most: int = _CHUNK) -> list[Message]:
        """The messages that have arrived on a readable connection. OSError: it is broken."""
        data = self.line.recv(most)
        if not data:
            raise BrokenError("the connection was closed")
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > _LONGEST:
            raise BrokenError("a message is too long")
        return [decode(line) for line in lines]

    def receive_first(self, deadline: float) -> Message:
        """The first message. Later ones stay in the socket, which so remains readable."""
        messages: list[Message] = []
        while not messages:
            end = _arrived(self.line, _CHUNK, deadline, socket.MSG_PEEK).find(b"\n") + 1
            messages = self.receive(end or _CHUNK)
        self.line.settimeout(_SEND_S)
        return messages[0]


def proof_s(nodes: int) -> float:
    """Seconds in which each end must prove the secret: more if thousands of nodes connect at once."""
    return PROOF_S + nodes / _PROVED_PER_S


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
        more = _arrived(line, count - len(data), deadline)
        if not more:
            raise BrokenError("the other end closed the connection: it does not have this run's secret")
        data += more
    return data


def _arrived(line: socket.socket, most: int, deadline: float, flags: int = 0) -> bytes:
    """What arrives next, before the deadline; nothing if the other end has closed the connection."""
    line.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        return line.recv(most, flags)
    except TimeoutError as error:
        raise BrokenError("the other end does not answer") from error


class Guest:
    """A connection that has not yet proved the secret, or not yet said which node it is."""

    def __init__(self, line: socket.socket, seconds: float) -> None:
        line.setblocking(False)
        self.line, self.nonce, self.greeting = line, os.urandom(NONCE), b""
        self.deadline = time.monotonic() + seconds
        self.connection: Connection | None = None

    def hear(self, secret: bytes) -> list[Message]:
        """Read a piece of the greeting, or, after the proof, messages. OSError: it is broken, or holds no secret."""
        if self.connection:
            return self.connection.receive()
        data = self.line.recv(GREETING - len(self.greeting))  # later bytes are messages
        self.greeting += data
        if not data:
            raise BrokenError("it left")
        if len(self.greeting) == GREETING:
            theirs = self.greeting[:NONCE]
            if not hmac.compare_digest(self.greeting[NONCE:], proof(secret, b"guest", self.nonce, theirs)):
                raise PermissionError("another run's, or nobody's")
            self.line.sendall(proof(secret, b"host", theirs, self.nonce))
            self.connection = Connection(self.line)
        return []


class Server:
    """Calls `came` with the connection and the first message of each guest that has proved the secret."""

    def __init__(
        self, listener: socket.socket, secret: bytes, came: Callable[[Connection, Message], None], nodes: int
    ) -> None:
        self.loop, self.turned_away = Loop(), 0
        self._listener, self._secret, self._came = listener, secret, came
        self._seconds = proof_s(nodes)
        self._guests: dict[int, Guest] = {}  # in the order of arrival, and so of their deadlines
        self._knocks = False
        listener.setblocking(False)
        self.loop.watch(listener.fileno(), self._knock)

    def serve(self, deadline: float) -> None:
        """Serve the guests until something has happened."""
        now = time.monotonic()
        while (oldest := self._oldest()) and now > oldest.deadline:
            self._drop(oldest)
        self.loop.look(min(deadline, oldest.deadline if oldest else deadline) - now)
        if self._knocks:  # last, or a crowd would push out those that are there
            self._accept()

    def close(self) -> None:
        """Close the connections that have proved nothing."""
        for guest in list(self._guests.values()):
            self._drop(guest)
        self.loop.forget_all()

    def _knock(self) -> None:
        self._knocks = True

    def _oldest(self) -> Guest | None:
        return next(iter(self._guests.values()), None)

    def _accept(self) -> None:
        self._knocks = False
        for _ in range(_AT_ONCE):
            try:
                line, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # the table of files is full
                    oldest = self._oldest()
                    self._drop(oldest) if oldest else time.sleep(_FULL_S)
                return
            guest = self._guests[line.fileno()] = Guest(line, self._seconds)
            self.loop.watch(line.fileno(), lambda guest=guest: self._hear(guest))  # type: ignore[misc]
            try:
                line.send(guest.nonce)
            except OSError:
                self._drop(guest)

    def _hear(self, guest: Guest) -> None:
        try:
            messages = guest.hear(self._secret)
        except OSError as error:
            self.turned_away += isinstance(error, PermissionError)
            self._drop(guest)
            return
        if messages and guest.connection:
            del self._guests[guest.line.fileno()]
            self.loop.forget(guest.line.fileno())
            self._came(guest.connection, messages[0])

    def _drop(self, guest: Guest) -> None:
        del self._guests[guest.line.fileno()]
        self.loop.forget(guest.line.fileno())
        guest.line.close()
