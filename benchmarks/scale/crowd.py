"""Thousands of nodes and strangers in one process: the guests' side of the rendezvous, one loop over all of them."""

from __future__ import annotations

import hmac
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from dray.runner import connections, rendezvous

_MOST = 65536  # bytes of one look


class Crowd:
    """All callers, by the file of their connection or by the time at which they act next."""

    def __init__(self, port: int, key: bytes) -> None:
        self.port, self.key = port, key
        self._poll = select.epoll()
        self._lines: dict[int, Caller] = {}
        self._due: list[tuple[float, int, Caller]] = []
        self._order = count()

    def later(self, caller: Caller, seconds: float) -> None:
        heappush(self._due, (time.monotonic() + seconds, next(self._order), caller))

    def connect(self, caller: Caller) -> None:
        """As the kernel has room; its first bytes or its end are heard."""
        line = caller.line = socket.socket()
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
        line.bind((caller.source, 0))
        line.connect_ex(("127.0.0.1", self.port))
        self._lines[line.fileno()] = caller
        self._poll.register(line, select.EPOLLIN)

    def leave(self, caller: Caller) -> None:
        assert caller.line
        del self._lines[caller.line.fileno()]
        caller.line.close()
        caller.line = None

    def until(self, over: Callable[[], bool], limit: float) -> None:
        deadline = time.monotonic() + limit
        while not over():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError
            while self._due and self._due[0][0] <= now:
                heappop(self._due)[2].act()
            pause = min(deadline, self._due[0][0] if self._due else deadline) - time.monotonic()
            for file, _ in self._poll.poll(max(0.0, pause) + 0.001):
                if caller := self._lines.get(file):
                    caller.hear()


class Caller:
    """Somebody at the first node's door."""

    line: socket.socket | None = None

    def __init__(self, crowd: Crowd, source: str) -> None:
        self.crowd, self.source = crowd, source

    def act(self) -> None:
        """It is due."""
        self.crowd.connect(self)

    def hear(self) -> None:
        """Something has come for it, or its connection has ended."""


class Node(Caller):
    """As `rendezvous.join`, `connections.greet` and the hello; whom the first node has no room for comes again."""

    def __init__(self, crowd: Crowd, number: int, nodes: int, hello: connections.Hello) -> None:
        super().__init__(crowd, f"127.0.0.{2 + number % 8}")  # one address has too few ports for all
        self.hello = hello._replace(node=number, name=f"n{number}")
        self.nodes, self.told = nodes, ""
        self._data, self._nonces, self._introduced = b"", (b"", b""), False
        crowd.later(self, rendezvous.pause(nodes) / 2 if nodes > 1024 else 0.0)

    def hear(self) -> None:
        assert self.line
        try:
            data = self.line.recv(_MOST)
            if not data:
                raise connections.BrokenError("it was shown out")
            self._data += data
            self._go_on(self.line)
        except OSError:
            self._again()

    def _again(self) -> None:
        self.crowd.leave(self)
        self._data, self._nonces, self._introduced = b"", (b"", b""), False
        self.crowd.later(self, rendezvous.pause(self.nodes))

    def _go_on(self, line: socket.socket) -> None:
        theirs, own = self._nonces
        if not theirs:
            if len(self._data) >= connections.NONCE:
                theirs, own = self._nonces = self._data[: connections.NONCE], os.urandom(connections.NONCE)
                self._data = self._data[connections.NONCE :]
                line.sendall(own + connections.proof(self.crowd.key, b"guest", theirs, own))
        elif not self._introduced:
            if len(self._data) >= 32:
                self._introduce(line, theirs, own)
        elif self._data.endswith(b"\n"):
            self.told = type(connections.decode(self._data)).__name__
            self.crowd.leave(self)

    def _introduce(self, line: socket.socket, theirs: bytes, own: bytes) -> None:
        if not hmac.compare_digest(self._data[:32], connections.proof(self.crowd.key, b"host", own, theirs)):
            sys.exit("the first node does not hold the secret")
        self._data = self._data[32:]
        line.sendall(connections.encode(self.hello._replace(time=time.time())))
        self._introduced = True


class Stranger(Caller):
    """Silent, a byte a second, half a message, a wrong proof, or rubbish without an end; again once it is shown out."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        super().__init__(crowd, "127.0.0.10")
        self.rubbish = (b"", b"x", b"x" * 40, os.urandom(connections.NONCE), bytes(100_000))[number % 5]
        crowd.later(self, 0)

    def act(self) -> None:
        if not self.line:
            self.crowd.connect(self)
        else:
            try:
                self.line.send(self.rubbish)
            except BlockingIOError:
                pass
            except OSError:
                self.crowd.leave(self)
        self.crowd.later(self, 1)

    def hear(self) -> None:
        assert self.line
        try:
            if self.line.recv(_MOST):
                return
        except OSError:
            pass
        self.crowd.leave(self)
