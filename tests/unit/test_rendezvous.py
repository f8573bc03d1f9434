"""Nodes that find one another, strangers that come by, and what runners tell one another afterwards."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from dray.contract.findings import UnfitError
from dray.runner import __main__ as runner
from dray.runner import address, channel, host, introduction
from dray.runner import rendezvous as meeting
from nodes import Start, ended, free_port, rendezvous

SLEEP = ["sh", "-c", "exec sleep 60"]


def greeting(secret: bytes) -> bytes:
    """What a node of the run sends to prove the secret, as somebody on the network sees it."""
    node, first = socket.socketpair()
    with node, first:
        nonce = os.urandom(channel.NONCE)
        first.sendall(nonce)
        thread = threading.Thread(target=channel.greet, args=(node, secret, time.monotonic() + 5))
        thread.start()
        seen = first.recv(channel.GREETING)
        assert channel.answer(first, secret, nonce, seen)
        thread.join()
    return seen


def silent(where: tuple[str, int]) -> Iterator[None]:
    with socket.create_connection(where):
        yield


def garbage(where: tuple[str, int]) -> Iterator[None]:
    for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"node": 1}\n', os.urandom(65536)):
        with socket.create_connection(where) as line:
            try:
                line.sendall(rubbish)
            except OSError:  # closed before all was sent
                continue
    yield


def slow(where: tuple[str, int]) -> Iterator[None]:
    """A byte a second keeps an ordinary timeout from ending."""
    stop = threading.Event()

    def drip() -> None:
        with socket.create_connection(where) as line:
            while not stop.wait(1):
                try:
                    line.sendall(b"x")
                except OSError:
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    yield
    stop.set()
    thread.join()


def wrong_secret(where: tuple[str, int]) -> Iterator[None]:
    with socket.create_connection(where) as line, pytest.raises(OSError, match="secret"):
        channel.greet(line, b"another", time.monotonic() + 5)
    yield


def replay(where: tuple[str, int]) -> Iterator[None]:
    seen = greeting(b"5ec2e7")
    with socket.create_connection(where, timeout=5) as line:
        assert len(line.recv(channel.NONCE)) == channel.NONCE
        line.sendall(seen)
        assert line.recv(64) == b""
    yield


def many(where: tuple[str, int]) -> Iterator[None]:
    lines = [socket.create_connection(where) for _ in range(200)]
    yield
    for line in lines:
        line.close()


@pytest.mark.parametrize("attack", [silent, garbage, slow, wrong_secret, replay, many], ids=lambda one: one.__name__)
def test_strangers_neither_join_nor_hold_up_a_launch(
    attack: Callable[[tuple[str, int]], Iterator[None]], plan: dict[str, Any], start: Start
) -> None:
    usual = seconds(plan, start, nobody)
    (Path(plan["folder"]) / "rendezvous.json").unlink()
    # A stranger is shown out after 5 s. Nodes that waited for that would need them, however busy this machine is.
    assert seconds(plan, start, attack) < 2 * usual + 3


def nobody(_: tuple[str, int]) -> Iterator[None]:
    yield


def seconds(plan: dict[str, Any], start: Start, attack: Callable[[tuple[str, int]], Iterator[None]]) -> float:
    """From the second node's start to the end of both."""
    first = start(0, 2, "node1")
    with contextmanager(attack)(rendezvous(plan)):
        begun = time.monotonic()
        second = start(1, 2, "node2")
        assert [ended(second)[0], ended(first)[0]] == [0, 0]
        return time.monotonic() - begun


def other(plan: dict[str, Any], folder: Path, secret: str) -> Path:
    """Another run's plan."""
    plan = deepcopy(plan)
    plan["folder"] = str(folder)
    (folder / "logs").mkdir(parents=True)
    (folder / "secret").write_text(secret)
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder / "plan.json"


def test_two_runs_that_start_at_once_on_the_same_nodes(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    """Once their jobs' numbers and process ids gave both the same port: jobs 7 and 8, port 21850."""
    runs = [other(plan, tmp_path / name, name) for name in ("a", "b")]
    nodes = [start(number, 2, f"node{number + 1}", run) for number in (0, 1) for run in runs]
    assert [ended(node)[0] for node in nodes] == [0, 0, 0, 0]
    assert len({(run.parent / "rendezvous.json").read_text() for run in runs}) == 2


def test_a_node_of_another_run_is_turned_away_and_harms_nobody(plan, start: Start, tmp_path: Path) -> None:
    """Two hostfile runs with the same fixed port."""
    plan["world"] |= {"port": free_port(), "shared_folder": False, "rendezvous_timeout_s": 8}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    theirs = start(1, 2, "node2", other(plan, tmp_path / "other", "another secret"))
    with socket.create_server(("127.0.0.1", plan["world"]["port"])) as first:
        line, _ = first.accept()  # it knocks, and will again and again
        line.close()
    ours = start(0, 2, "node1")
    assert [ended(start(1, 2, "node2"))[0], ended(ours)[0]] == [0, 0]
    code, said = ended(theirs)
    assert (code, said.splitlines()[0]) == (69, "node 1 (node2) could not reach the first node in 8 s")


def test_who_came_first_hears_from_the_first_node_who_is_missing(plan, start: Start, tmp_path: Path) -> None:
    """Though its own time is over before the first node's, which came later."""
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    plan["world"]["rendezvous_timeout_s"] = 4
    with address.listen(plan["world"]) as listener:
        meeting.publish(plan, listener)
        early = start(1, 3, "node2")
        select.select([listener], [], [])
        time.sleep(0.5)
        own = introduction.introduction(plan, 0, runner.digest(plan))
        with pytest.raises(UnfitError, match="1 of 3 nodes did not come in 4 s") as missing:
            host.gather(plan, own, b"5ec2e7", listener)
    code, said = ended(early)
    assert (code, f"  found:  {missing.value.finding.problem}" in said) == (69, True), said
    assert not (tmp_path / "failures").exists()


def test_a_node_without_the_secret_is_told_apart_from_one_that_is_late(plan, start: Start, tmp_path: Path) -> None:
    plan["world"] |= {"rendezvous_timeout_s": 3}
    first = start(0, 2, "node1")
    where = rendezvous(plan)
    stranger = other(plan, tmp_path / "other", "another secret")
    (stranger.parent / "rendezvous.json").write_text(json.dumps({"address": where[0], "port": where[1], "attempt": 1}))
    second = start(1, 2, "node2", stranger)
    assert "without this run's secret were closed" in ended(first)[1]
    code, said = ended(second)
    assert (code, "it does not hold this run's secret" in said) == (69, True)


def test_a_run_without_its_secret_does_not_start(plan, start: Start, tmp_path: Path) -> None:
    (tmp_path / "secret").unlink()
    code, said = ended(start(0, 2, "node1"))
    assert (code, said.splitlines()[0]) == (78, "the run's secret cannot be read")


def test_a_node_waits_for_this_attempt_s_own_file(plan, start: Start, tmp_path: Path) -> None:
    (tmp_path / "rendezvous.json").write_text(json.dumps({"address": "127.0.0.1", "port": 1, "attempt": 9}))
    second = start(1, 2, "node2")
    assert [ended(start(0, 2, "node1"))[0], ended(second)[0]] == [0, 0]


def test_one_node_listens_on_loopback_and_tells_nobody(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    with address.listen({**plan["world"], "interfaces": ["nothsn9"]}) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert ended(start(0, 1, "node1"))[0] == 0
    assert not (tmp_path / "rendezvous.json").exists()


def test_a_name_that_is_loopback_on_its_own_machine_is_another_address_for_others(monkeypatch) -> None:
    """As Debian has it: 127.0.1.1 and the machine's name in /etc/hosts."""
    monkeypatch.setattr(address, "_resolve", lambda _: "127.0.1.1")
    monkeypatch.setattr(address, "_route", lambda _: "10.0.0.1")
    nodes = [{"name": name, "address": name} for name in ("n1", "n2")]
    world = {"nodes": nodes, "master": "n1", "interfaces": [], "shared_folder": True}
    assert address.addresses(world) == ["10.0.0.1"]
    assert address.addresses({**world, "interfaces": ["lo"]}) == ["127.0.0.1"]


class TestChannel:
    """Messages after the proof."""

    @pytest.fixture
    def ends(self) -> Iterator[tuple[channel.Channel, channel.Channel]]:
        host, guest = socket.socketpair()
        with host, guest:
            yield channel.Channel(host, b"key", host=True), channel.Channel(guest, b"key", host=False)

    def test_messages_come_in_their_order(self, ends) -> None:
        host, guest = ends
        for number in range(3):
            host.send({"number": number})
        assert guest.receive() == [{"number": 0}, {"number": 1}, {"number": 2}]

    @pytest.mark.parametrize("how", ["changed", "replayed", "reflected"])
    def test_a_message_of_anybody_else_ends_the_connection(self, ends, how: str) -> None:
        host, guest = ends
        host.send({"stop": 15})
        line = guest.line.recv(4096)
        sent = {"changed": line.replace(b"15", b"99"), "replayed": line + line, "reflected": line}[how]
        to, through = (host, guest) if how == "reflected" else (guest, host)
        through.line.sendall(sent)
        with pytest.raises(OSError, match="a message without its proof"):
            to.receive()

    def test_a_message_without_an_end_ends_the_connection(self, ends) -> None:
        host, guest = ends
        host.line.sendall(b"x" * 70000)
        assert guest.receive() == []
        with pytest.raises(OSError, match="a message is too long"):
            guest.receive()


# What runners tell one another while their launchers run.


def launchers(plan: dict[str, Any], *scripts: list[str]) -> None:
    """Each node runs its own script."""
    cases = "".join(f"{number}) exec {' '.join(map(repr, words))};;" for number, words in enumerate(scripts))
    plan["launcher"] = ["sh", "-c", f'case "$0" in {cases} esac', "{node_rank}"]


def running(*files: Path) -> None:
    deadline = time.monotonic() + 20
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_node_that_fails_ends_the_others_with_the_cause(plan, start: Start, tmp_path: Path) -> None:
    launchers(plan, SLEEP, ["sh", "-c", "sleep 0.5; exit 7"])
    begun = time.monotonic()
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    (first, said), (second, _) = ended(nodes[0]), ended(nodes[1])
    assert (first, second, time.monotonic() - begun < 10) == (7, 7, True)
    assert "dray: this node ends: the launcher ended with exit code 7" in said
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-1.json"]


def test_a_failure_of_the_first_node_ends_the_others_too(plan, start: Start, tmp_path: Path) -> None:
    launchers(plan, ["sh", "-c", "sleep 0.5; exit 7"], SLEEP)
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    assert [ended(node)[0] for node in nodes] == [7, 7]
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-0.json"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_runner_that_is_killed_is_a_lost_node_with_a_name(lost: int, plan, start: Start, tmp_path: Path) -> None:
    mark = ["sh", "-c", f"touch {tmp_path}/$$.mark; exec sleep 60"]
    launchers(plan, mark, mark)
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("*.mark"))) < 2:
        assert time.monotonic() < deadline
    nodes[lost].kill()
    begun = time.monotonic()
    code, said = ended(nodes[1 - lost])
    assert (code, time.monotonic() - begun < 8) == (75, True), said
    assert f"node {lost} (node{lost + 1}) is gone" in said


def test_a_stop_of_one_node_is_heard_on_all(plan, start: Start, tmp_path: Path) -> None:
    trap = f"trap 'echo $0 >> {tmp_path}/heard; exit 3' TERM; touch {tmp_path}/$0.ready; while :; do sleep 0.05; done"
    plan["launcher"] = ["sh", "-c", trap, "{node_rank}"]
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    running(tmp_path / "0.ready", tmp_path / "1.ready")
    nodes[1].send_signal(signal.SIGTERM)
    assert [ended(node)[0] for node in nodes] == [3, 3]
    assert sorted((tmp_path / "heard").read_text().split()) == ["0", "1"]
    assert not (tmp_path / "failures").exists()


def test_the_first_node_waits_for_the_others(plan, start: Start) -> None:
    launchers(plan, ["true"], ["sh", "-c", "sleep 1; exit 5"])
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    assert [ended(node)[0] for node in nodes] == [5, 5]
