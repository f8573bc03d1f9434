"""The runner as the nodes run it: real processes, real sockets, only the launcher is a small script."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dray.runner import __main__ as runner
from dray.runner import rank as rank_module

RANK_KEEPER = Path(rank_module.__file__)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    """A plan for two nodes on loopback, whose launcher writes down what it was given."""
    (tmp_path / "logs").mkdir()
    return {
        "folder": str(tmp_path),
        "launcher": [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--node-rank", "{node_rank}"],
        "command": ["train", "{node_rank}"],
        "world": {
            "nodes": [{"name": "node1", "address": "127.0.0.1"}, {"name": "node2", "address": "127.0.0.1"}],
            "ranks_per_node": 2,
            "size": 4,
            "master": "127.0.0.1",
            "port": free_port(),
            "meet_within": 20,
            "identity": {"node": "DRAY_NODE", "nodes": "DRAY_NODES", "name": "DRAY_NODE_NAME"},
        },
    }


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(plan: dict[str, Any], tmp_path: Path):
    """Start the runner as one node."""
    started = []

    def begin(node: object = "0", nodes: object = "2", name: str | None = "node1", path: Path | None = None):
        file = path or tmp_path / "plan.json"
        if path is None:
            file.write_text(json.dumps(plan))
        identity = {"DRAY_NODE": node, "DRAY_NODES": nodes, "DRAY_NODE_NAME": name}
        env = {key: str(value) for key, value in identity.items() if value is not None}
        process = subprocess.Popen(
            [sys.executable, "-m", "dray.runner", file],
            env={"PATH": os.environ["PATH"], **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out + err


def test_two_nodes_meet_and_become_the_launcher(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    for number, node in enumerate(nodes):
        given = [
            *["--node-rank", str(number), sys.executable, "-S", "-E", str(RANK_KEEPER), str(tmp_path), "4"],
            *[f"node{number + 1}", "train", "{node_rank}"],
        ]
        assert ended(node) == (0, f"{given}\n")
    assert not (tmp_path / "failures").exists()


def test_the_order_in_which_nodes_come_does_not_matter(start: Start, tmp_path: Path) -> None:
    late = start(1, 2, "node2")
    time.sleep(0.3)  # the guest knocks before the master opens; nothing tells us that it has
    assert [ended(start(0, 2, "node1"))[0], ended(late)[0]] == [0, 0]


REFUSALS = {
    "no number": (
        (None, "2", "node1"),
        "DRAY_NODE does not tell this node who it is",
        ("DRAY_NODE=0 or more", "DRAY_NODE is not set"),
    ),
    "a number that is none": (
        ("two", "2", "node1"),
        "DRAY_NODE does not tell this node who it is",
        ("DRAY_NODE=0 or more", "DRAY_NODE=two"),
    ),
    "another node count": (
        ("0", "3", "node1"),
        "the plan is for another number of nodes than DRAY_NODES says",
        ("2 nodes", "DRAY_NODES=3"),
    ),
    "a number outside": (("2", "2", "node1"), "DRAY_NODE is not a node of the plan", ("0 to 1", "DRAY_NODE=2")),
    "every node believes that it is node 0": (
        ("0", "2", "node2"),
        "this node believes that it is node 0, and the plan has another host there",
        ("node 0 is node1", "DRAY_NODE_NAME=node2, DRAY_NODE=0"),
    ),
    "no name": (
        ("0", "2", None),
        "this node believes that it is node 0, and the plan has another host there",
        ("node 0 is node1", "DRAY_NODE_NAME=(not set), DRAY_NODE=0"),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_node_that_is_not_who_the_plan_expects_stops(case: str, start: Start, tmp_path: Path) -> None:
    identity, why, (wanted, found) = REFUSALS[case]
    code, err = ended(start(*identity))
    assert code == 78
    assert err.splitlines()[:3] == [why, f"  wanted: {wanted}", f"  found:  {found}"]
    record = json.loads((tmp_path / "failures" / f"node-{identity[0] or 'unknown'}.json").read_text())
    assert (record["code"], record["rank"], record["why"]) == (78, None, err.rstrip("\n"))


def test_a_node_that_never_comes_is_named_within_the_deadline(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["meet_within"] = 1
    before = time.monotonic()
    code, err = ended(start(0, 2, "node1"))
    assert (code, time.monotonic() - before < 10) == (69, True)
    assert err.splitlines()[:3] == [
        "1 of 2 nodes did not come in 1 s",
        f"  wanted: all nodes at 127.0.0.1 port {plan['world']['port']}",
        "  found:  missing: node2",
    ]


def test_a_master_that_never_comes_is_named_within_the_deadline(plan, start: Start) -> None:
    plan["world"]["meet_within"] = 1
    code, err = ended(start(1, 2, "node2"))
    assert code == 69
    assert err.splitlines()[0] == "node 1 (node2) could not meet the master in 1 s"


def test_a_busy_port_is_try_again(plan, start: Start, tmp_path: Path) -> None:
    with socket.create_server(("", plan["world"]["port"])):
        code, err = ended(start(0, 2, "node1"))
    assert code == 75
    assert err.splitlines()[0] == f"port {plan['world']['port']} is busy on node1"


def test_a_busy_port_is_try_again_on_one_node_too(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    with socket.create_server(("", plan["world"]["port"])):
        assert ended(start(0, 1, "node1"))[0] == 75


def test_the_master_names_who_is_missing_though_it_came_late(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    plan["world"]["meet_within"] = 3
    early = start(1, 3, "node2")
    time.sleep(2)  # the master's deadline is to end after the guest's own
    assert ended(start(0, 3, "node1"))[0] == 69
    code, err = ended(early)
    assert code == 69
    assert "  found:  1 of 3 nodes did not come in 3 s" in err
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-0.json"]


def test_another_plan_stops_all_nodes(plan, start: Start, tmp_path: Path) -> None:
    master = start(0, 2, "node1")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**plan, "command": ["something else"]}))
    guest = start(1, 2, "node2", other)
    code, err = ended(master)
    assert (code, err.splitlines()[0]) == (78, "node 1 (node2) holds another plan")
    guest_code, guest_err = ended(guest)
    assert guest_code == 78
    assert "  found:  node 1 (node2) holds another plan" in guest_err
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-0.json"]


def test_a_stranger_at_the_port_changes_nothing(plan, start: Start) -> None:
    master = start(0, 2, "node1")
    for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"node": 1}\n'):
        while True:
            try:
                with socket.create_connection(("127.0.0.1", plan["world"]["port"]), timeout=5) as line:
                    line.sendall(rubbish)
                break
            except ConnectionRefusedError:
                assert master.poll() is None
    assert [ended(start(1, 2, "node2"))[0], ended(master)[0]] == [0, 0]


def test_a_launcher_that_is_not_there_is_recorded(plan, start: Start, tmp_path: Path) -> None:
    plan["launcher"] = ["no-such-launcher"]
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    code, err = ended(start(0, 1, "node1"))
    assert (code, err) == (127, "the launcher cannot start: no-such-launcher: No such file or directory\n")
    assert json.loads((tmp_path / "failures" / "node-0.json").read_text())["why"] == err.strip()


def test_the_node_number_replaces_whole_words_of_the_launcher_only() -> None:
    words = runner.argv(
        {
            "launcher": ["l", "{node_rank}", "x{node_rank}"],
            "folder": "/r",
            "world": {"size": 2, "nodes": [{"name": f"n{number}"} for number in range(8)]},
            "command": ["{node_rank}"],
        },
        "7",
    )
    assert words[:3] == ["l", "7", "x{node_rank}"]
    assert words[-1] == "{node_rank}"


# The keeper of one rank.


@contextmanager
def kept(folder: Path, *command: str, **env: str):
    (folder / "logs").mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", RANK_KEEPER, folder, "2", "node2", *command],
        env={"PATH": os.environ["PATH"], "RANK": "1", "WORLD_SIZE": "2", **env},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def record_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "failures" / "rank-1.json").read_text())
    del record["time"]
    return record


def test_a_rank_that_ends_well_leaves_its_log_and_no_record(tmp_path: Path) -> None:
    with kept(tmp_path, "sh", "-c", "echo out; echo err >&2") as rank:
        assert rank.wait(10) == 0
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "out\nerr\n"
    assert not (tmp_path / "failures").exists()


def test_a_rank_that_fails_is_recorded_with_its_own_code(tmp_path: Path) -> None:
    with kept(tmp_path, "sh", "-c", "seq 30; echo why >&2; exit 3") as rank:
        assert rank.wait(10) == 3
    assert record_of(tmp_path) == {
        "node": "node2",
        "rank": 1,
        "code": 3,
        "why": "exit code 3",
        "log": f"{tmp_path}/logs/rank-1.log",
        "last_lines": [*(str(number) for number in range(12, 31)), "why"],
    }


def test_a_rank_that_is_killed_is_recorded_with_the_signal(tmp_path: Path) -> None:
    with kept(tmp_path, "sh", "-c", "kill -9 $$") as rank:
        assert rank.wait(10) == 137
    assert (record_of(tmp_path)["code"], record_of(tmp_path)["why"]) == (137, "killed by SIGKILL")


def test_a_rank_that_the_launcher_stops_is_not_the_cause(tmp_path: Path) -> None:
    with kept(tmp_path, "sh", "-c", "echo ready; exec sleep 60") as rank:
        log = tmp_path / "logs" / "rank-1.log"
        while not log.exists() or log.read_text() != "ready\n":
            assert rank.poll() is None
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(10) == 143
    assert not (tmp_path / "failures").exists()


def test_a_record_that_cannot_be_written_does_not_hide_the_code(tmp_path: Path) -> None:
    (tmp_path / "failures").write_text("in the way")
    with kept(tmp_path, "sh", "-c", "exit 42") as rank:
        assert rank.wait(10) == 42
    assert "cannot be written" in (tmp_path / "logs" / "rank-1.log").read_text()


def runs(process: Path) -> bool:
    """Whether this folder of /proc is a process that is neither gone nor only waiting to be reaped."""
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """As torchrun does, the launcher gives the rank a session of its own; no group holds them together."""
    (tmp_path / "logs").mkdir()
    launcher = (
        "import subprocess, sys, time\n"
        "subprocess.Popen(sys.argv[1:], start_new_session=True)\n"
        "print('started', flush=True)\n"
        "time.sleep(60)"
    )
    command = ["sh", "-c", "echo $$; exec sleep 60"]
    started = subprocess.Popen(
        [sys.executable, "-c", launcher, sys.executable, "-S", "-E", RANK_KEEPER, tmp_path, "2", "node2", *command],
        env={"PATH": os.environ["PATH"], "RANK": "1", "WORLD_SIZE": "2"},
        stdout=subprocess.PIPE,
    )
    log = tmp_path / "logs" / "rank-1.log"
    deadline = time.monotonic() + 20
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
    rank = Path("/proc", log.read_text().strip())
    assert rank.exists()
    started.kill()
    started.communicate()
    while runs(rank):
        assert time.monotonic() < deadline


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with kept(tmp_path, "no-such-command") as rank:
        assert rank.wait(10) == 127
    assert record_of(tmp_path)["last_lines"] == ["no-such-command: No such file or directory"]


def test_a_launcher_that_makes_another_world_is_stopped(tmp_path: Path) -> None:
    with kept(tmp_path, "touch", str(tmp_path / "ran"), WORLD_SIZE="1") as rank:
        assert rank.wait(10) == 78
    assert record_of(tmp_path)["why"] == "the launcher made another world: RANK=1 WORLD_SIZE=1, the plan has 2 ranks"
    assert not (tmp_path / "ran").exists()


def test_the_runner_loads_nothing_that_is_slow_to_load() -> None:
    """Each of these costs 5 to 40 ms at every start; benchmarks/runner.py measures the whole."""
    loaded = "import sys, dray.runner.__main__; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    slow = {
        "argparse",
        "asyncio",
        "dataclasses",
        "inspect",
        "logging",
        "pathlib",
        "ssl",
        "subprocess",
        "urllib.request",
    }
    assert not slow & set(ended.stdout.split())


def test_a_keeper_loads_almost_nothing() -> None:
    loaded = f"import sys; sys.path.insert(0, {str(RANK_KEEPER.parent)!r}); import rank; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-S", "-E", "-c", loaded], capture_output=True, text=True, check=True)
    assert not {"json", "socket", "re"} & set(ended.stdout.split())
