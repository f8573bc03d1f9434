"""Sends a file from node to node in chunks: a node passes on each chunk while it receives the next ones.

Each chunk follows a head with its number and its digest, which carries a proof by the connection's key. Memory holds
one chunk; the kernel sends from the file.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from dray.runner import channel
from dray.runner.channel import BrokenError, Channel

CHUNK = 4 << 20
LOST_S = 10.0  # a peer that waits itself says so every second; one that says nothing is lost
STALLED_S = 60.0  # without a new chunk
_WAIT_S = 1.0
_SEND_S = 60.0
_HEAD = struct.Struct("!QI32s")
_UNPROVED = 16  # connections of nobody knows whom


class StalledError(OSError):
    """The peers answer but have no new chunk: another peer would have no more."""


class File:
    """A file of which the first chunks have arrived, with their digests."""

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size, self.chunk = file, size, CHUNK
        self.count = -(-size // self.chunk)
        self._digests: list[bytes] = []
        self._more = threading.Condition()
        self._over = False

    @property
    def here(self) -> int:
        """How many chunks have arrived."""
        return len(self._digests)

    def length(self, number: int) -> int:
        """The bytes of this chunk; the last one is shorter."""
        return min(self.chunk, self.size - number * self.chunk)

    def put(self, data: memoryview, digest: bytes) -> None:
        """Write the next chunk into the file."""
        at = self.here * self.chunk
        while data:
            written = os.pwrite(self.file, data, at)
            data, at = data[written:], at + written
        self.add(digest)

    def add(self, digest: bytes) -> None:
        """Note that the next chunk is in the file."""
        with self._more:
            self._digests.append(digest)
            self._more.notify_all()

    def end(self) -> None:
        """Note that no more chunks will come."""
        with self._more:
            self._over = True
            self._more.notify_all()

    def digest(self, number: int) -> bytes | None:
        """The digest of a chunk that has arrived; None after a second without it. BrokenError: it will never come."""
        with self._more:
            if self.here <= number and not self._over:
                self._more.wait(_WAIT_S)
            if self.here > number:
                return self._digests[number]
            if self._over:
                raise BrokenError("this node itself does not get the rest")
            return None


def read(source: int, file: File, *, keep: bool) -> None:
    """As the first node: read the file once, from beginning to end."""
    buffer = memoryview(bytearray(file.chunk))
    for number in range(file.count):
        data, at = buffer[: file.length(number)], number * file.chunk
        while data:
            got = os.preadv(source, [data], at)
            if not got:
                raise OSError(f"the image ends after {at} of {file.size} bytes")
            data, at = data[got:], at + got
        data = buffer[: file.length(number)]
        digest = hashlib.sha256(data).digest()
        if keep:
            file.put(data, digest)
        else:
            file.add(digest)


def fetch(peer: Channel, file: File, deadline: float, came: Callable[[], None] = lambda: None) -> None:
    """Fetch all missing chunks in order, and call `came` after each. OSError: another peer may have them."""
    line = peer.line
    peer.send({"from": file.here})
    line.settimeout(LOST_S)
    head, buffer = memoryview(bytearray(_HEAD.size)), memoryview(bytearray(file.chunk))
    since = time.monotonic()
    while file.here < file.count:
        _fill(line, head, deadline)
        number, length, digest = _HEAD.unpack(head)
        if number != file.here:
            raise BrokenError("a chunk out of order")
        if not length:  # it waits, too
            if time.monotonic() - since > STALLED_S:
                raise StalledError(f"no chunk arrived in {STALLED_S:.0f} s")
            continue
        if length != file.length(number):
            raise BrokenError(f"chunk {number} has the wrong length")
        data = buffer[:length]
        _fill(line, data, deadline)
        if hashlib.sha256(data).digest() != digest:
            raise BrokenError(f"chunk {number} was changed on its way")
        file.put(data, digest)
        came()
        since = time.monotonic()


def push(line: socket.socket, file: int, at: int, length: int) -> None:
    """Send a chunk from the file."""
    with os.fdopen(file, "rb", closefd=False) as source:
        if line.sendfile(source, at, length) != length:
            raise BrokenError("the file became shorter")


class Server:
    """Sends the chunks to all peers that prove the run's secret, each in a thread of its own."""

    def __init__(self, address: str, key: bytes, file: File) -> None:
        self._listener = socket.create_server((address, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._key, self._file = key, file
        self._unproved: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            line, _ = self._listener.accept()
            with self._lock:
                if len(self._unproved) >= _UNPROVED:
                    _end(next(iter(self._unproved)))
                self._unproved[line] = None
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        try:
            first, peer = self._prove(line)
            self._send(peer, first)
        except (OSError, TypeError, ValueError):  # it is gone, or nobody's; who needs it asks another node
            pass
        finally:
            line.close()

    def _prove(self, line: socket.socket) -> tuple[int, Channel]:
        try:
            deadline, nonce = time.monotonic() + channel.PROOF_S, os.urandom(channel.NONCE)
            line.settimeout(channel.PROOF_S)
            line.sendall(nonce)
            peer = channel.answer(line, self._key, nonce, channel.read(line, channel.GREETING, deadline))
            if peer is None:
                raise BrokenError("another run's, or nobody's")
            return int(peer.receive_one(deadline).get("from", -1)), peer
        finally:
            with self._lock:
                self._unproved.pop(line, None)

    def _send(self, peer: Channel, first: int) -> None:
        peer.line.settimeout(_SEND_S)
        for number in range(max(0, first), self._file.count):
            while (digest := self._file.digest(number)) is None:
                _head(peer, number, 0, bytes(32))
            length = self._file.length(number)
            _head(peer, number, length, digest)
            push(peer.line, self._file.file, number * self._file.chunk, length)


def _head(peer: Channel, number: int, length: int, digest: bytes) -> None:
    head = _HEAD.pack(number, length, digest)
    peer.line.sendall(head, socket.MSG_MORE if length else 0)


def _fill(line: socket.socket, buffer: memoryview, deadline: float) -> None:
    while buffer:
        if time.monotonic() > deadline:
            raise StalledError("the deadline for the image has passed")
        got = line.recv_into(buffer)
        if not got:
            raise BrokenError("the other end closed the connection")
        buffer = buffer[got:]


def _end(line: socket.socket) -> None:
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has gone by itself
        return
