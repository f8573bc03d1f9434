"""A connection whose two ends have proved that they hold the run's secret.

Before the proof nothing of a peer's is parsed: 64 bytes are compared. After it its messages are believed: it is this
program too, in the same run.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import time
from contextlib import suppress
from typing import Any

NONCE = 32
GREETING = NONCE + 32  # the guest's nonce and its proof
PROOF_S = 5.0  # from connecting to having said who one is; other users and slow ones are closed then
_CHUNK, _LONGEST = 1 << 16, 1 << 20  # bytes that are read at once, and of a message: the reports of a node's ranks
_PROVED_PER_S = 1000  # nodes that a busy first node proves
_SEND_S = 5.0
_PART_S = 5.0  # from the last word to the close, for an end that does not read
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 30_000}


def proof_s(nodes: int) -> float:
    """Seconds in which each end must prove the secret: more if thousands of nodes connect at once."""
    return PROOF_S + nodes / _PROVED_PER_S


class BrokenError(OSError):
    """The peer is gone, or has sent something invalid."""


def _proof(secret: bytes, what: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join((b"dray ", what, *parts)), "sha256")


class Channel:
    """One end of a connection; it sends and receives dictionaries."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._data = b""
        line.settimeout(_SEND_S)
        if line.family != socket.AF_UNIX:  # a node that loses its power or its network says nothing
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. OSError: the peer is gone, or does not read; then the connection is over for both."""
        try:
            self.line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # perhaps in the middle of a line, to which the next message would be appended
            with suppress(OSError):  # it is closed already
                self.line.shutdown(socket.SHUT_RDWR)
            raise

    def receive(self, most: int = _CHUNK) -> list[dict[str, Any]]:
        """The messages that have arrived on a readable connection. OSError: it is broken."""
        data = self.line.recv(most)
        if not data:
            raise BrokenError("the connection was closed")
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > _LONGEST:
            raise BrokenError("a message is too long")
        return [json.loads(line) for line in lines]

    def receive_one(self, deadline: float) -> dict[str, Any]:
        """The next message. Later ones stay in the socket, which so remains readable."""
        messages: list[dict[str, Any]] = []
        while not messages:
            _wait(self.line, deadline)
            end = self.line.recv(_CHUNK, socket.MSG_PEEK).find(b"\n") + 1
            messages = self.receive(end or _CHUNK)
        return messages[0]

    def close(self) -> None:
        """Close the connection."""
        self.line.close()


def greet(line: socket.socket, secret: bytes, deadline: float) -> Channel:
    """As the guest, which connects: prove the secret, and check the host's proof."""
    theirs = read(line, NONCE, deadline)
    own = os.urandom(NONCE)
    line.sendall(own + _proof(secret, b"guest", theirs, own))
    if not hmac.compare_digest(read(line, 32, deadline), _proof(secret, b"host", own, theirs)):
        raise BrokenError("the other end does not have this run's secret")
    return Channel(line)


def answer(line: socket.socket, secret: bytes, nonce: bytes, greeting: bytes) -> Channel | None:
    """As the host, which has sent the nonce: return a channel if the greeting proves the secret."""
    theirs = greeting[:NONCE]
    if not hmac.compare_digest(greeting[NONCE:], _proof(secret, b"guest", nonce, theirs)):
        return None
    line.sendall(_proof(secret, b"host", theirs, nonce))
    return Channel(line)


def part(channels: dict[int, Channel], seconds: float = _PART_S) -> None:
    """Close and remove those whose other end closes within these seconds, and so has read everything.

    The kernel resets a connection that is closed with unread data, and drops the last message.
    """
    deadline, nodes = time.monotonic() + seconds, {one.line.fileno(): node for node, one in channels.items()}
    poll = select.poll()  # it opens no file, which this process may not be able to any more
    for file, node in nodes.items():
        with suppress(OSError):  # it is gone, which is seen below
            channels[node].line.shutdown(socket.SHUT_WR)
        poll.register(file, select.POLLIN)
    while channels and (left := deadline - time.monotonic()) > 0:
        for file, _ in poll.poll(left * 1000):
            data = b""
            with suppress(OSError):
                data = channels[nodes[file]].line.recv(_CHUNK)
            if not data:
                poll.unregister(file)
                channels.pop(nodes[file]).close()


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
