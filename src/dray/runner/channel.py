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
    """Seconds in which each end must prove the secret: more if thousands of nodes connect at once."""
    return PROOF_S + nodes / _PROVED_PER_S


class BrokenError(OSError):
    """The peer is gone, or has sent something invalid."""


def _proof(secret: bytes, what: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join((b"dray ", what, *parts)), "sha256")


class Channel:
    """One end of a connection; it sends and receives dictionaries."""

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
        """Send a message. OSError: the peer is gone, or does not read."""
        text = json.dumps(message).encode()
        proof = _proof(self._key, self._own, self._sent.to_bytes(8, "big"), text)
        self._sent += 1
        self.line.sendall(proof.hex().encode() + text + b"\n")

    def receive(self, most: int = _LONGEST) -> list[dict[str, Any]]:
        """The messages that have arrived on a readable connection. OSError: it is broken."""
        data = self.line.recv(most)
        if not data:
            raise BrokenError("the connection was closed")
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > _LONGEST:
            raise BrokenError("a message is too long")
        return [self._message(line) for line in lines]

    def receive_one(self, deadline: float) -> dict[str, Any]:
        """The next message. Later ones stay in the socket, which so remains readable."""
        messages: list[dict[str, Any]] = []
        while not messages:
            _wait(self.line, deadline)
            end = self.line.recv(_LONGEST, socket.MSG_PEEK).find(b"\n") + 1
            messages = self.receive(end or _LONGEST)
        return messages[0]

    def close(self) -> None:
        """Close the connection."""
        self.line.close()

    def seal(self, what: bytes) -> bytes:
        """A proof that this end sent these bytes outside of messages; they must contain a number of their own."""
        return _proof(self._key, self._own, b"piece ", what)

    def sealed(self, what: bytes, proof: bytes) -> bool:
        """Whether the other end sent these bytes."""
        return hmac.compare_digest(proof, _proof(self._key, self._theirs, b"piece ", what))

    def _message(self, line: bytes) -> dict[str, Any]:
        proof, text = line[:64], line[64:]
        wanted = _proof(self._key, self._theirs, self._received.to_bytes(8, "big"), text).hex().encode()
        self._received += 1
        if not hmac.compare_digest(proof, wanted):
            raise BrokenError("a message without a valid proof")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise BrokenError("a malformed message")
        return message


def finding(fields: object) -> Finding:
    """The finding that a peer has sent. OSError: a field is missing, or has the wrong type."""
    try:
        found = Finding(**fields)  # type: ignore[arg-type]
    except TypeError:
        raise BrokenError("a malformed finding") from None
    kinds = {"code": (int,), "rank": (int, type(None))}
    if found.code not in _CODES or any(type(one) not in kinds.get(of, (str,)) for of, one in found._asdict().items()):
        raise BrokenError("a malformed finding")
    return found


def greet(line: socket.socket, secret: bytes, deadline: float) -> Channel:
    """As the guest, which connects: prove the secret, and check the host's proof."""
    theirs = read(line, NONCE, deadline)
    own = os.urandom(NONCE)
    line.sendall(own + _proof(secret, b"guest", theirs, own))
    if not hmac.compare_digest(read(line, 32, deadline), _proof(secret, b"host", own, theirs)):
        raise BrokenError("the other end does not have this run's secret")
    return Channel(line, _proof(secret, b"key", theirs, own), host=False)


def answer(line: socket.socket, secret: bytes, nonce: bytes, greeting: bytes) -> Channel | None:
    """As the host, which has sent the nonce: return a channel if the greeting proves the secret."""
    theirs = greeting[:NONCE]
    if not hmac.compare_digest(greeting[NONCE:], _proof(secret, b"guest", nonce, theirs)):
        return None
    line.sendall(_proof(secret, b"host", theirs, nonce))
    return Channel(line, _proof(secret, b"key", nonce, theirs), host=True)


def part(channels: Iterable[Channel], seconds: float = _PART_S) -> None:
    """Close these once the other ends have closed theirs, and so have read everything.

    The kernel resets a connection that is closed with unread data, and drops the last message.
    """
    left = {one.line.fileno(): one for one in channels}
    with suppress(OSError):  # of epoll itself, where this process can open no more files
        _drain(left, time.monotonic() + seconds)
    for one in left.values():
        one.close()


def _drain(left: dict[int, Channel], deadline: float) -> None:
    """Close and remove those whose other end has closed."""
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
    """Read exactly `count` bytes, all of them before the deadline."""
    data = b""
    while len(data) < count:
        _wait(line, deadline)
        more = line.recv(count - len(data))
        if not more:
            raise BrokenError("the other end closed the connection: it does not have this run's secret")
        data += more
    return data


def _wait(line: socket.socket, deadline: float) -> None:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    if not poll.poll(max(0, (deadline - time.monotonic()) * 1000)):
        raise BrokenError("the other end does not answer")
