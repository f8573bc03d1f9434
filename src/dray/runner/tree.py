"""The first node's side of the tree by which nodes pass on the image: who copies from whom, and when all are done.

Nodes get their places in the order in which they come, so that a parent is always there before: the second and the
third node copy from the first, the fourth and the fifth from the second. One loop serves all of them.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.runner import channel, rendezvous_server
from dray.runner.channel import Channel

START_S = 60.0  # until the first of the others has come
ABSENT_S = 30.0  # after the last arrival, nobody waits any longer for a node that has not come
SILENT_S = 90.0  # nor for one that gets no more; one whose peers only wait gives up by itself, after chunks.STALLED_S
NEWS_S = 10.0  # how often a node that gets more tells it
_LOOK_S = 1.0


@dataclass
class _Node:
    """A node that has come."""

    link: Channel
    number: int
    heard: float = 0.0
    """When its last message came; it sends some while it gets chunks."""
    at: tuple[str, int] | None = None
    """The address at which it passes on the image; None if it takes no copy."""
    parent: _Node | None = None
    """The node from which it copies; None: the first node."""
    done: bool = False
    gone: bool = False


class Tree:
    """Decides from which node each node copies."""

    def __init__(self, world: Mapping[str, Any], key: bytes, listener: socket.socket, at: tuple[str, int]) -> None:
        self._names = [node["name"] for node in world["nodes"]]
        self._nodes, self._key, self._listener, self._at = len(self._names), key, listener, at
        self._come: dict[int, _Node] = {}
        self._order: list[_Node] = []
        self._room = rendezvous_server.allow_files(world)
        self._unproved: dict[socket.socket, rendezvous_server.Pending] = {}
        self._links: dict[socket.socket, _Node] = {}
        self._selector = selectors.DefaultSelector()
        self._last = self._looked = time.monotonic()
        self.read = threading.Event()
        """Whether this node has read the whole image; until then others may still come."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self, deadline: float) -> None:
        """Serve until all nodes have their copy, have given up, or did not come in time."""
        while not self._over(deadline):
            for ready, _ in self._selector.select(0.2):
                line = ready.fileobj
                assert isinstance(line, socket.socket)
                if line is self._listener:
                    self._accept()
                elif line in self._unproved:
                    self._prove(line)
                elif line in self._links:
                    self._hear(line)
            now = time.monotonic()
            for line in [line for line, visitor in self._unproved.items() if now > visitor.deadline]:
                self._close(line)
            if now > self._looked + _LOOK_S:
                self._looked = now
                self._leave_out(now)
        for node in self._come.values():
            if not node.gone:
                _tell(node, {"over": True})

    def _leave_out(self, now: float) -> None:
        """Give up on nodes that hang, for example with their disk: their kernel keeps the connection open."""
        for node in self._come.values():
            if not node.done and not node.gone and now > node.heard + SILENT_S:
                name = self._names[node.number]
                print(
                    f"dray: {name} got no more of the image for {SILENT_S:.0f} s: nobody waits for it now",
                    flush=True,
                )
                node.gone = True
                self._close(node.link.line)

    def _over(self, deadline: float) -> bool:
        now = time.monotonic()
        if now > deadline:
            return True
        if not self.read.is_set() or any(not node.done and not node.gone for node in self._come.values()):
            return False
        return len(self._come) == self._nodes - 1 or now > self._last + (ABSENT_S if self._come else START_S)

    def _accept(self) -> None:
        if len(self._unproved) >= self._room:
            self._close(next(iter(self._unproved)))
        try:
            line, _ = self._listener.accept()
        except OSError:
            return
        visitor = rendezvous_server.Pending(line, channel.proof_s(self._nodes))
        self._unproved[line] = visitor
        self._selector.register(line, selectors.EVENT_READ)
        try:
            line.send(visitor.nonce)
        except OSError:
            self._close(line)

    def _prove(self, line: socket.socket) -> None:
        visitor = self._unproved[line]
        try:
            visitor.greeting += visitor.read()
            if len(visitor.greeting) < channel.GREETING:
                return
            link = channel.answer(line, self._key, visitor.nonce, visitor.greeting)
        except OSError:
            link = None
        if link is None:
            self._close(line)
            return
        del self._unproved[line]
        self._links[line] = _Node(link, -1)

    def _hear(self, line: socket.socket) -> None:
        node = self._links[line]
        try:
            for message in node.link.receive():
                node.heard = time.monotonic()
                self._answer(node, message)
        except (OSError, KeyError, TypeError, ValueError):
            node.gone = True
            self._close(line)

    def _answer(self, node: _Node, message: dict[str, Any]) -> None:
        if node.number < 0:
            number, port = int(message["node"]), int(message["port"])
            if not 0 < number < self._nodes or number in self._come:
                raise ValueError("no such node, or it has come already")
            node.number, self._come[number], self._last = number, node, time.monotonic()
            if not port:  # it takes none, and waits for the others alone
                node.done = True
                return
            node.at = (node.link.line.getpeername()[0], port)
            self._order.append(node)
            above = (len(self._order) - 1) // 2
            node.parent = self._order[above - 1] if above else None
            self._place(node)
        elif "lost" in message:
            node.parent = node.parent.parent if node.parent else None
            self._place(node)
        elif "have" in message:
            node.done = True

    def _place(self, node: _Node) -> None:
        """Tell the node from which other one to copy: the nearest above it that is there."""
        while node.parent and node.parent.gone:
            node.parent = node.parent.parent
        node.link.send({"at": node.parent.at if node.parent else self._at})

    def _close(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        self._unproved.pop(line, None)
        self._links.pop(line, None)
        line.close()


def _tell(node: _Node, message: dict[str, Any]) -> None:
    try:
        node.link.send(message)
    except OSError:  # it is gone
        node.gone = True
