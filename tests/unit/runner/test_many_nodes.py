"""What the first node does with thousands of others: comings-again, lists of the missing, files, pauses."""

from __future__ import annotations

import resource
import socket
import threading
import time
from typing import Any

import pytest

from dray.contract.findings import DrayError, UnfitError
from dray.runner import address, channel, rendezvous, rendezvous_server
from dray.runner.hello import make_hello
from nodes import SECRET

pytestmark = pytest.mark.hostile("rendezvous")
KEY = SECRET.encode()


class First:
    """The first node, in a thread."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.guests, self.error = plan, {}, None
        self.listener = address.listen(plan["world"])
        self._thread = threading.Thread(target=self._gather)
        self._thread.start()

    def _gather(self) -> None:
        try:
            own = make_hello(self.plan, 0, "digest")
            self.guests = rendezvous_server.gather(self.plan, own, KEY, self.listener)
        except DrayError as error:
            self.error = error

    def end(self) -> DrayError | None:
        self._thread.join(30)
        self.listener.close()
        for guest in self.guests.values():
            guest.close()
        return self.error


def come(first: First, hello: dict[str, Any]) -> channel.Channel:
    one = channel.greet(socket.create_connection(first.listener.getsockname()), KEY, time.monotonic() + 10)
    one.send(hello)
    return one


@pytest.fixture
def three(plan: dict[str, Any]) -> dict[str, Any]:
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    return plan


def test_a_node_that_lost_its_connection_comes_again(three: dict[str, Any]) -> None:
    """The network told nobody: to the first node the old connection is still there."""
    first = First(three)
    hello = make_hello(three, 1, "digest")
    before, after = come(first, hello), come(first, hello)
    with pytest.raises(OSError, match="closed"):
        before.receive_one(time.monotonic() + 10)
    before.close()
    last = come(first, make_hello(three, 2, "digest"))
    assert [one.receive_one(time.monotonic() + 10) for one in (after, last)] == [{"go": True}] * 2
    after.close()
    last.close()
    assert first.end() is None


def test_another_runner_with_its_number_stops_the_launch(three: dict[str, Any]) -> None:
    first = First(three)
    both = [come(first, make_hello(three, 1, "digest")) for _ in range(2)]
    told = [one.receive_one(time.monotonic() + 10)["refused"]["problem"] for one in both]
    assert told == ["two nodes have the number 1"] * 2
    for one in both:
        one.close()
    assert first.end()


@pytest.mark.seconds
def test_the_missing_are_named_exactly(plan: dict[str, Any]) -> None:
    plan["world"]["nodes"] = [{"name": f"n{number}", "address": "127.0.0.1"} for number in range(10_000)]
    plan["world"]["rendezvous_timeout_s"] = 0.5
    error = First(plan).end()
    assert error
    assert (error.problem, error.finding.found) == (
        "9999 of 10000 nodes did not reach the first one in 0.5 s",
        "missing: n[1-9999]",
    )


def test_a_list_that_no_message_can_hold_is_in_the_log(plan: dict[str, Any], capsys) -> None:
    names = [f"n{number}-{'x' * (number % 7)}{number * 7919}" for number in range(5000)]
    plan["world"]["nodes"] = [{"name": name, "address": "127.0.0.1"} for name in names]
    plan["world"]["rendezvous_timeout_s"] = 0.2
    error = First(plan).end()
    assert error
    assert len(error.finding.found) < 9000
    assert error.finding.found.endswith(" ..., all in logs/node-0.log")
    told = capsys.readouterr().out
    assert told.startswith("dray: missing: n")
    assert all(f"{name.partition(chr(45))[0]}-" in told for name in names[1:])


def test_too_few_files_are_said_before_anybody_waits(plan: dict[str, Any], monkeypatch) -> None:
    plan["world"]["nodes"] *= 2000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("nothing is raised"))
    with pytest.raises(UnfitError) as refused:
        rendezvous_server.allow_files({**plan["world"], "nodes": plan["world"]["nodes"] * 2})
    assert str(refused.value).splitlines() == [
        "the first node may open 4096 files, too few for 8000 nodes",
        "  where:  node1",
        "  wanted: a hard limit of 8128 open files: one for each node and some more",
        "  found:  ulimit -Hn: 4096",
        "  fix:    ask the administrators to raise it (LimitNOFILE of slurmd), or ask for 3968 nodes at most",
    ]


@pytest.mark.parametrize(
    ("nodes", "limits", "raised", "unproved"),
    [
        (2, (1024, 4096), None, 512),
        (1024, (1024, 1 << 20), 2112, 1024),
        (10_000, (1024, 1 << 20), 20_064, 10_000),
        (10_000, (1024, 10_200), 10_200, 136),
        (10_000, (1024, resource.RLIM_INFINITY), 20_064, 10_000),
        (10_000, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 10_000),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(monkeypatch, nodes: int, limits, raised, unproved: int) -> None:
    asked: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: asked.append(both[0]))
    assert rendezvous_server.allow_files({"nodes": [{"name": "n"}] * nodes}) == unproved
    assert asked == ([raised] if raised else [])


@pytest.mark.parametrize(("nodes", "longest"), [(2, 0.05), (100, 0.05), (1024, 0.512), (10_000, 5.0), (10**6, 5.0)])
def test_many_nodes_do_not_try_in_one_wave(nodes: int, longest: float) -> None:
    pause = 0.05
    for _ in range(20):
        pause = rendezvous.longer(pause, nodes)
    assert pause == longest
    assert all(longest / 2 <= rendezvous.jittered(longest) < 1.5 * longest for _ in range(100))
