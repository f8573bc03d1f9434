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

from dray.contract.findings import Finding, UnfitError
from dray.runner import connections
from dray.runner import rendezvous as meeting
from dray.runner.children import Loop
from dray.runner.connections import (
    Ended,
    Entered,
    Failed,
    Idle,
    Message,
    Progress,
    Report,
    Reports,
    Restart,
    Seen,
    Signal,
    StartTimes,
    Welcome,
)
from dray.runner.heartbeats import Late
from dray.runner.rendezvous import gather, make_hello
from nodes import SECRET, Start, control, decoded, ended, free_port, planned, rendezvous

pytestmark = pytest.mark.hostile("rendezvous")

SLEEP = ["sh", "-c", "exec sleep 60"]


def greeting(secret: bytes) -> bytes:
    """What a node of the run sends to prove the secret, as somebody on the network sees it."""
    node, first = socket.socketpair()
    with node, first:
        nonce = os.urandom(connections.NONCE)
        first.sendall(nonce)
        thread = threading.Thread(target=connections.greet, args=(node, secret, time.monotonic() + 5))
        thread.start()
        seen = first.recv(connections.NONCE + 32, socket.MSG_WAITALL)
        first.sendall(connections.proof(secret, b"host", seen[: connections.NONCE], nonce))
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
        connections.greet(line, b"another", time.monotonic() + 5)
    yield


def replay(where: tuple[str, int]) -> Iterator[None]:
    seen = greeting(SECRET.encode())
    with socket.create_connection(where, timeout=5) as line:
        assert len(line.recv(connections.NONCE)) == connections.NONCE
        line.sendall(seen)
        assert line.recv(64) == b""
    yield


def many(where: tuple[str, int]) -> Iterator[None]:
    lines = [socket.create_connection(where) for _ in range(200)]
    yield
    for line in lines:
        line.close()


@pytest.mark.seconds
@pytest.mark.parametrize(
    "attack",
    [*(pytest.param(attack, marks=pytest.mark.slow) for attack in (silent, garbage, slow, replay)), wrong_secret, many],
    ids=lambda one: one.__name__,
)
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
    (folder / "secret").write_text(secret.ljust(32, "."))
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder / "plan.json"


@pytest.mark.seconds
def test_two_runs_that_start_at_once_on_the_same_nodes(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    """Once their jobs' numbers and process ids gave both the same port: jobs 7 and 8, port 21850."""
    runs = [other(plan, tmp_path / name, name) for name in ("a", "b")]
    nodes = [start(number, 2, f"node{number + 1}", run) for number in (0, 1) for run in runs]
    assert [ended(node)[0] for node in nodes] == [0, 0, 0, 0]
    assert len({(run.parent / "rendezvous.json").read_text() for run in runs}) == 2


@pytest.mark.slow
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


@pytest.mark.seconds
def test_who_came_first_hears_from_the_first_node_who_is_missing(plan, start: Start, tmp_path: Path) -> None:
    """Though its own time is over before the first node's, which came later."""
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    plan["world"]["rendezvous_timeout_s"] = 4
    first = decoded(plan)
    with meeting.listen(first.world) as listener:
        meeting.publish(first, listener.getsockname())
        early = start(1, 3, "node2")
        select.select([listener], [], [])
        time.sleep(0.5)
        own = make_hello(first)
        with pytest.raises(UnfitError, match="1 of 3 nodes did not reach the first one in 4 s") as missing:
            gather(first, own, SECRET.encode(), listener)
    code, said = ended(early)
    assert (code, f"  found:  {missing.value.finding.problem}" in said) == (69, True), said
    assert not (tmp_path / "failures").exists()


@pytest.mark.seconds
def test_a_node_without_the_secret_is_told_apart_from_one_that_is_late(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["rendezvous_timeout_s"] = 4
    stranger = other(plan, tmp_path / "other", "another secret")
    first = decoded(plan)
    with meeting.listen(first.world) as listener:
        meeting.publish(first._replace(folder=str(stranger.parent)), listener.getsockname())
        second = start(1, 2, "node2", stranger)
        select.select([listener], [], [])
        own = make_hello(first)
        with pytest.raises(UnfitError, match="did not reach the first one"):
            gather(first, own, SECRET.encode(), listener)
        code, said = ended(second)
    assert (code, "does not have this run's secret" in said) == (69, True)


def test_a_run_without_its_secret_does_not_start(plan, start: Start, tmp_path: Path) -> None:
    (tmp_path / "secret").unlink()
    code, said = ended(start(0, 2, "node1"))
    assert (code, said.splitlines()[0]) == (78, "the run's secret cannot be read")


def shown_out(line: socket.socket) -> bool:
    """Whether the first node ends the connection."""
    line.settimeout(30)
    try:
        while line.recv(connections.NONCE):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.seconds
def test_another_plan_without_the_secret_is_nobody_s(plan: dict[str, Any], start: Start) -> None:
    """With it, it is an error of the user's: test_another_plan_stops_all_nodes."""
    first = start(0, 2, "node1")
    where = rendezvous(plan)
    other = make_hello(decoded(plan, 1)._replace(digest="another digest"))
    with socket.create_connection(where) as line:
        line.sendall(json.dumps(other).encode().ljust(connections.NONCE + 32) + b"\n")
        assert shown_out(line)
    with socket.create_connection(where) as line:
        nonce = connections._read(line, connections.NONCE, time.monotonic() + 30)
        line.sendall(nonce + connections.proof(b"another secret", b"guest", nonce, nonce))
        connections.Connection(line).send(other)
        assert shown_out(line)
    assert [ended(start(1, 2, "node2"))[0], ended(first)[0]] == [0, 0]


@pytest.mark.slow
@pytest.mark.seconds
def test_a_drip_has_one_deadline_for_all_of_it(plan: dict[str, Any], start: Start) -> None:
    """A byte at a time, each within any timeout of its own."""
    plan["world"]["rendezvous_timeout_s"] = 120
    first = start(0, 2, "node1")
    with socket.create_connection(rendezvous(plan)) as line:
        line.settimeout(0.5)
        deadline = time.monotonic() + 60
        gone = False
        while not gone:
            assert time.monotonic() < deadline
            try:
                line.sendall(b"x")
                gone = len(line.recv(connections.NONCE)) == 0
            except TimeoutError:
                continue
            except ConnectionError:
                gone = True
    assert [ended(start(1, 2, "node2"))[0], ended(first)[0]] == [0, 0]


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["x" * 300, "..", "a\0b"])
def test_an_address_that_cannot_be_one_is_a_missing_node(plan: dict[str, Any], start: Start, name: str) -> None:
    plan["world"]["rendezvous_timeout_s"] = 1
    told = {"address": name, "port": 5, "attempt": 1}
    (Path(plan["folder"]) / "rendezvous.json").write_text(json.dumps(told))
    code, said = ended(start(1, 2, "node2"))
    assert (code, said.splitlines()[0]) == (69, "node 1 (node2) could not reach the first node in 1 s")


@pytest.mark.parametrize("secret", ["", "\n", "short", "\0" * 8])
def test_a_secret_that_anybody_could_guess_is_refused(plan, start: Start, tmp_path: Path, secret: str) -> None:
    """A disk that was full leaves such a file."""
    (tmp_path / "secret").write_text(secret)
    code, said = ended(start(0, 2, "node1"))
    assert (code, said.splitlines()[0]) == (78, "the run's secret cannot be read")


@pytest.mark.seconds
def test_a_node_waits_for_this_attempt_s_own_file(plan, start: Start, tmp_path: Path) -> None:
    (tmp_path / "rendezvous.json").write_text(json.dumps({"address": "127.0.0.1", "port": 1, "attempt": 9}))
    second = start(1, 2, "node2")
    assert [ended(start(0, 2, "node1"))[0], ended(second)[0]] == [0, 0]


@pytest.mark.seconds
def test_one_node_listens_on_loopback(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    with meeting.listen(decoded(plan).world._replace(interfaces=("nothsn9",))) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert ended(start(0, 1, "node1"))[0] == 0


def test_a_name_that_is_loopback_on_its_own_machine_is_another_address_for_others(monkeypatch) -> None:
    """As Debian has it: 127.0.1.1 and the machine's name in /etc/hosts."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(meeting, "_route", lambda _: "10.0.0.1")
    world = decoded(planned(Path("/none"), master="n1")).world
    assert meeting.addresses(world) == ["10.0.0.1"]
    assert meeting.addresses(world._replace(interfaces=("lo",))) == ["127.0.0.1"]


class TestConnection:
    """Messages after the proof."""

    @pytest.fixture
    def ends(self) -> Iterator[tuple[connections.Connection, connections.Connection]]:
        host, guest = socket.socketpair()
        with host, guest:
            yield connections.Connection(host), connections.Connection(guest)

    def test_messages_come_in_their_order(self, ends) -> None:
        host, guest = ends
        for number in range(3):
            host.send(Progress(number))
        assert guest.receive() == [Progress(0), Progress(1), Progress(2)]

    def test_what_is_right_behind_the_awaited_message_stays_readable(self, ends) -> None:
        host, guest = ends
        for message in (Welcome(), Signal(15), Ended()):
            host.send(message)
        assert isinstance(guest.receive_first(time.monotonic() + 10), Welcome)
        assert select.select([guest.line], [], [], 0)[0]
        assert [type(message) for message in guest.receive()] == [Signal, Ended]

    def test_a_connection_is_over_once_a_message_could_not_be_sent(self, ends) -> None:
        """It may be cut in the middle, and the next one would be appended to it."""
        host, guest = ends
        host.line.settimeout(0.1)
        with pytest.raises(TimeoutError):
            host.send(Failed(Finding("x" * 10_000_000)))
        while guest.line.recv(1 << 16):
            pass
        assert host.line.recv(1) == b""

    @pytest.fixture
    def crossing(self) -> Iterator[tuple[connections.Connection, connections.Connection, list[Message]]]:
        """Two ends over TCP, of which each has told what the other has not read; most of the host's waits in its
        kernel."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            line = socket.socket()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(listener.getsockname())
            there, _ = listener.accept()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        with line, there:
            host, guest = connections.Connection(there), connections.Connection(line)
            told: list[Message] = [Failed(Finding(f"{number}{'x' * 4000}")) for number in range(30)]
            for message in told:
                host.send(message)
            guest.send(Idle())
            yield host, guest, told

    @staticmethod
    def closing(plan: dict[str, Any], *ends: connections.Connection) -> list[threading.Thread]:
        """Their own limit is no way out of the test."""
        threads = [
            threading.Thread(target=control(plan, {1: one}, Loop()).close, args=(600.0,), daemon=True) for one in ends
        ]
        for thread in threads:
            thread.start()
        return threads

    @staticmethod
    def over(threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)

    def test_the_last_word_arrives_though_something_is_unread(self, crossing, plan) -> None:
        """Else the others take the first node for lost."""
        host, guest, told = crossing
        closing = self.closing(plan, host)
        heard: list[Message] = []
        while len(heard) <= len(told):
            heard += guest.receive()
        assert (heard[:-1], type(heard[-1])) == (told, Ended)
        guest.line.close()
        self.over(closing)

    def test_who_reads_nothing_is_not_waited_for(self, crossing, plan) -> None:
        host, _, _ = crossing
        began = time.monotonic()
        control(plan, {1: host}, Loop()).close(0.2)
        assert time.monotonic() - began < 10

    def test_two_that_part_at_once(self, crossing, plan) -> None:
        host, guest, _ = crossing
        self.over(self.closing(plan, host, guest))
        assert [host.line.fileno(), guest.line.fileno()] == [-1, -1]

    def test_one_that_was_killed(self, crossing, plan) -> None:
        """Its kernel resets the connection."""
        host, guest, _ = crossing
        guest.line.close()
        self.over(self.closing(plan, host))
        assert host.line.fileno() == -1


SEEN = Seen(3, "n1", 5, "step", "runs", ("f (a.py:1)",), (Entered("0", 9, "all_gather", waits=True),))


@pytest.mark.parametrize(
    "message",
    [
        make_hello(decoded(planned(Path("/none")))),
        Failed(Finding("it failed", found="x\ny", code=75, rank=3)),
        Late(1, True, 4.5, 6.5),
        SEEN,
        Reports((Report(1, "n1", "log", "rank 1", findings=(Finding("p"),)),)),
        StartTimes({"import": 1.5}),
        Restart(1, 5, Finding("why")),
    ],
)
def test_what_is_decoded_is_what_was_encoded(message: Message) -> None:
    found = connections.decode(connections.encode(message))
    assert type(found) is type(message)
    assert json.dumps(connections._named(found)) == json.dumps(connections._named(message))


@pytest.mark.parametrize("line", [b"", b"{", b'{"Signal": [1, 2]}', b'{"Late": [1]}', b'{"Signal": 5}'])
def test_a_malformed_line_ends_the_connection(plan, line: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = Loop()
        links = control(plan, {1: connections.Connection(ours)}, loop)
        theirs.sendall(line + b"\n")
        loop.look(1.0)
    assert links.cause.problem == "node 1 (node2) is gone"
    assert links.cause.found.startswith("malformed message: ")
    assert capsys.readouterr().out.count("malformed message") == 1
    assert ours.fileno() == -1


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


@pytest.mark.seconds
def test_a_node_that_fails_ends_the_others_with_the_cause(plan, start: Start, tmp_path: Path) -> None:
    launchers(plan, SLEEP, ["sh", "-c", "sleep 0.5; exit 7"])
    begun = time.monotonic()
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    (first, said), (second, _) = ended(nodes[0]), ended(nodes[1])
    assert (first, second, time.monotonic() - begun < 10) == (7, 7, True)
    assert "dray: this node's ranks are stopped: the launcher ended: exit code 7" in said
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-1.json"]


@pytest.mark.seconds
def test_a_failure_of_the_first_node_ends_the_others_too(plan, start: Start, tmp_path: Path) -> None:
    launchers(plan, ["sh", "-c", "sleep 0.5; exit 7"], SLEEP)
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    assert [ended(node)[0] for node in nodes] == [7, 7]
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-0.json"]


@pytest.mark.seconds
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
    assert (code, time.monotonic() - begun < 20) == (75, True), said
    assert f"node {lost} (node{lost + 1}) is gone" in said
    (record,) = (tmp_path / "failures").iterdir()
    left = json.loads(record.read_text())
    assert (record.name, left["lost"]) == (f"node-{1 - lost}-lost-{lost}.json", True)
    assert (left["node"], left["code"], left["why"].splitlines()[0]) == (
        f"node{lost + 1}",
        75,
        f"node {lost} (node{lost + 1}) is gone",
    )


def test_a_stop_of_one_node_is_heard_on_all(plan, start: Start, tmp_path: Path) -> None:
    trap = f"trap 'echo $0 >> {tmp_path}/heard; exit 3' TERM; touch {tmp_path}/$0.ready; while :; do sleep 0.05; done"
    plan["launcher"] = ["sh", "-c", trap, "{node_rank}"]
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    running(tmp_path / "0.ready", tmp_path / "1.ready")
    nodes[1].send_signal(signal.SIGTERM)
    assert [ended(node)[0] for node in nodes] == [3, 3]
    assert sorted((tmp_path / "heard").read_text().split()) == ["0", "1"]
    assert not (tmp_path / "failures").exists()


@pytest.mark.seconds
def test_the_first_node_waits_for_the_others(plan, start: Start) -> None:
    launchers(plan, ["true"], ["sh", "-c", "sleep 1; exit 5"])
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    assert [ended(node)[0] for node in nodes] == [5, 5]
