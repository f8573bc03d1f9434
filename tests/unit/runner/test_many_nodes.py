"""What the first node does with thousands of others: two of one number, lists of the missing, files, pauses."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from dray.contract.findings import DrayError
from dray.runner import connections, rendezvous
from dray.runner.connections import Hello, Message
from dray.runner.rendezvous import make_hello
from nodes import SECRET, decoded

pytestmark = pytest.mark.hostile("rendezvous")
KEY = SECRET.encode()


class First:
    """The first node, in a thread."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.guests, self.error = decoded(plan), {}, None
        self.listener = rendezvous.listen(self.plan.world)
        self._thread = threading.Thread(target=self._gather)
        self._thread.start()

    def _gather(self) -> None:
        try:
            own = make_hello(self.plan)
            self.guests = rendezvous.gather(self.plan, own, KEY, self.listener)
        except DrayError as error:
            self.error = error

    def end(self) -> DrayError | None:
        self._thread.join(30)
        self.listener.close()
        for guest in self.guests.values():
            guest.line.close()
        return self.error


def come(first: First, hello: Hello) -> connections.Connection:
    one = connections.greet(socket.create_connection(first.listener.getsockname()), KEY, time.monotonic() + 10)
    one.send(hello)
    return one


def answer(one: connections.Connection) -> Message:
    return one.receive_first(time.monotonic() + 10)


@pytest.fixture
def three(plan: dict[str, Any]) -> dict[str, Any]:
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    return plan


def test_another_runner_with_its_number_stops_the_launch(three: dict[str, Any]) -> None:
    first = First(three)
    both = [come(first, make_hello(decoded(three, 1))) for _ in range(2)]
    told = [answer(one).finding.problem for one in both]
    assert told == ["two nodes have the number 1"] * 2
    for one in both:
        one.line.close()
    assert first.end()


@pytest.mark.seconds
def test_the_missing_are_named_exactly(plan: dict[str, Any]) -> None:
    plan["world"]["nodes"] = [{"name": f"n{number}", "address": "127.0.0.1"} for number in range(10_000)]
    plan["world"]["rendezvous_timeout_s"] = 1
    error = First(plan).end()
    assert error
    assert (error.problem, error.finding.found) == (
        "9999 of 10000 nodes did not reach the first one in 1 s",
        "missing: n[1-9999]",
    )


@pytest.mark.parametrize(("nodes", "usual"), [(2, 0.05), (100, 0.05), (1024, 0.512), (10_000, 5.0), (10**6, 5.0)])
def test_many_nodes_do_not_try_in_one_wave(nodes: int, usual: float) -> None:
    assert all(usual / 2 <= rendezvous.pause(nodes) < 1.5 * usual for _ in range(100))
