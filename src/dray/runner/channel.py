"""A connection whose two ends have proved that they hold the run's secret.

Before the proof nothing of a peer's is parsed: 64 bytes are compared. After it each message carries a proof of its own,
with its number and its direction: bytes that somebody slips into a connection could stop the run. A proof costs 10 µs.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from dray.contract.findings import Finding

NONCE = 32
GREETING = NONCE + 32  # the guest's nonce and its proof
PROOF_S = 5.0  # from connecting to having said who one is; other users and slow ones are closed then
_LONGEST = 65536
_PROVED_PER_S = 1000  # nodes that a busy first node proves
_SEND_S = 5.0
_PART_S = 5.0  # from the last word to the close, for an end that does not read
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 30_000}
_CODES = range(1, 256)


def proof_s(nodes: int) -> float:
    """Seconds that either end of a connection has for the proof: longer where thousands come at once."""
    return PROOF_S + nodes / _PROVED_PER_S


class BrokenError(OSError):
    """The peer is gone, or is not who it was."""


def _proof(secret: bytes, what: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join((b"dray ", what, *parts)), "sha256")


class Channel:
    """One end of it. Sends and receives dictionaries."""

    def __init__(self, line: socket.socket, key: bytes, *, host: bool) -> None:
        self.line = line
        self._key, self._own, self._theirs = key, *((b"host", b"guest") if host else (b"guest", b"host"))
        self._sent = self._received = 0
        self._data = b""
        line.settimeout(_SEND_S)
        if line.family != socket.AF_UNIX:  # a node that loses its power or its network says nothing
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """OSError: the peer is gone, or does not read."""
        text = json.dumps(message).encode()
        proof = _proof(self._key, self._own, self._sent.to_bytes(8, "big"), text)
        self._sent += 1
        self.line.sendall(proof.hex().encode() + text + b"\n")

    def receive(self, most: int = _LONGEST) -> list[dict[str, Any]]:
        """The messages that have come, once the connection can be read. OSError: it is of no more use."""
        data = self.line.recv(most)
        if not data:
            raise BrokenError("the connection was closed")
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > _LONGEST:
            raise BrokenError("a message is too long")
        return [self._message(line) for line in lines]

    def receive_one(self, deadline: float) -> dict[str, Any]:
        """The next message. What is right behind it stays in the connection, which can be read until somebody does."""
        messages: list[dict[str, Any]] = []
        while not messages:
            _wait(self.line, deadline)
            end = self.line.recv(_LONGEST, socket.MSG_PEEK).find(b"\n") + 1
            messages = self.receive(end or _LONGEST)
        return messages[0]

    def close(self) -> None:
        """End it."""
        self.line.close()

    def seal(self, what: bytes) -> bytes:
        """A proof that this end sends what is no message; what is sealed has a number of its own."""
        return _proof(self._key, self._own, b"piece ", what)

    def sealed(self, what: bytes, proof: bytes) -> bool:
        """Whether the other end sent it."""
        return hmac.compare_digest(proof, _proof(self._key, self._theirs, b"piece ", what))

    def _message(self, line: bytes) -> dict[str, Any]:
        proof, text = line[:64], line[64:]
        wanted = _proof(self._key, self._theirs, self._received.to_bytes(8, "big"), text).hex().encode()
        self._received += 1
        if not hmac.compare_digest(proof, wanted):
            raise BrokenError("a message without its proof")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise BrokenError("a message of another kind")
        return message


def finding(fields: object) -> Finding:
    """The finding that a peer has sent. OSError: a field is missing, or of another kind."""
    try:
        found = Finding(**fields)  # type: ignore[arg-type]
    except TypeError:
        raise BrokenError("a finding of another kind") from None
    kinds = {"code": (int,), "rank": (int, type(None))}
    if found.code not in _CODES or any(type(one) not in kinds.get(of, (str,)) for of, one in found._asdict().items()):
        raise BrokenError("a finding of another kind")
    return found


def greet(line: socket.socket, secret: bytes, deadline: float) -> Channel:
    """As the guest: prove the secret, and have it proved."""
    theirs = read(line, NONCE, deadline)
    own = os.urandom(NONCE)
    line.sendall(own + _proof(secret, b"guest", theirs, own))
    if not hmac.compare_digest(read(line, 32, deadline), _proof(secret, b"host", own, theirs)):
        raise BrokenError("it does not hold this run's secret")
    return Channel(line, _proof(secret, b"key", theirs, own), host=False)


def answer(line: socket.socket, secret: bytes, nonce: bytes, greeting: bytes) -> Channel | None:
    """As the host, which has sent the nonce: a channel, if the greeting proves the secret."""
    theirs = greeting[:NONCE]
    if not hmac.compare_digest(greeting[NONCE:], _proof(secret, b"guest", nonce, theirs)):
        return None
    line.sendall(_proof(secret, b"host", theirs, nonce))
    return Channel(line, _proof(secret, b"key", nonce, theirs), host=True)


def part(channels: Iterable[Channel], seconds: float = _PART_S) -> None:
    """Close these once the other ends have done so, which they do when they have read all.

    The kernel resets a connection that is closed with something unread, and drops what was told last.
    """
    left = {one.line.fileno(): one for one in channels}
    with suppress(OSError):  # of epoll itself, where this process can open no more files
        _drain(left, time.monotonic() + seconds)
    for one in left.values():
        one.close()


def _drain(left: dict[int, Channel], deadline: float) -> None:
    """Close and take out those whose other end has closed."""
    with select.epoll() as poll:
        for file, one in left.items():
            with suppress(OSError):  # it is gone, which is seen below
                one.line.shutdown(socket.SHUT_WR)
            poll.register(file, select.EPOLLIN)
        while left and (seconds := deadline - time.monotonic()) > 0:
            for file, _ in poll.poll(seconds):
                data = b""
                with suppress(OSError):
                    data = left[file].line.recv(_LONGEST)
                if not data:
                    poll.unregister(file)
                    left.pop(file).close()


def read(line: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly so many bytes; one deadline for all of them, however slowly they come."""
    data = b""
    while len(data) < count:
        _wait(line, deadline)
        more = line.recv(count - len(data))
        if not more:
            raise BrokenError("it closed the connection: it does not hold this run's secret")
        data += more
    return data


def _wait(line: socket.socket, deadline: float) -> None:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    if not poll.poll(max(0, (deadline - time.monotonic()) * 1000)):
        raise BrokenError("it does not answer")
