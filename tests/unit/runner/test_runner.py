"""The runner as the nodes run it: real processes, real sockets, only the launcher is a small script."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.contract.findings import ConfigError, Finding, UnfitError
from dray.contract.ranges import parse, render
from dray.runner import __main__ as runner
from dray.runner import launcher, records
from dray.runner import rank as rank_module
from dray.runner.connections import Hello, Restart
from dray.runner.plan import read
from dray.runner.rendezvous import interface_address, why_refused
from helpers import PYTHON
from nodes import UNBOUND, Start, decoded, ended, free_port, loopback, planned, rendezvous

RANK = Path(rank_module.__file__)
RANKS = [sys.executable, "-S", "-E", RANK.with_name("ranks.py")]


@pytest.mark.seconds
def test_two_nodes_supervise_their_launchers(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    for number, node in enumerate(nodes):
        given = [
            *["--node-rank", str(number), sys.executable, "-S", "-E", str(RANK), str(tmp_path), "4"],
            *[f"node{number + 1}", "true", "{node_rank}"],
        ]
        assert ended(node) == (0, f"{UNBOUND}\n{given}\n")
    assert not (tmp_path / "failures").exists()


@pytest.mark.seconds
def test_the_order_in_which_nodes_come_does_not_matter(start: Start, tmp_path: Path) -> None:
    late = start(1, 2, "node2")
    time.sleep(0.3)  # the guest knocks before the master opens; nothing tells us that it has
    assert [ended(start(0, 2, "node1"))[0], ended(late)[0]] == [0, 0]


def test_two_nodes_of_one_number_are_both_told(plan: dict[str, Any], start: Start) -> None:
    """As when `--node 1` is typed on two machines: neither waits until its time is over."""
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    nodes = [start(0, 3, "node1"), start(1, 3, "node2"), start(1, 3, "node2")]
    for node in nodes:
        code, said = ended(node)
        assert (code, "two nodes have the number 1" in said) == (78, True), said


_NOT_A_NODE = "this task is not a node of the plan"
_NODES = "DRAY_NODES=2 DRAY_NODE=0 DRAY_NODE_NAME=node1, DRAY_NODES=2 DRAY_NODE=1 DRAY_NODE_NAME=node2"
REFUSALS = {
    "no number": ((None, "2", "node1"), _NOT_A_NODE, (_NODES, "DRAY_NODES=2 DRAY_NODE= DRAY_NODE_NAME=node1")),
    "a number that is none": (
        ("two", "2", "node1"),
        _NOT_A_NODE,
        (_NODES, "DRAY_NODES=2 DRAY_NODE=two DRAY_NODE_NAME=node1"),
    ),
    "another node count": (
        ("0", "3", "node1"),
        _NOT_A_NODE,
        (_NODES, "DRAY_NODES=3 DRAY_NODE=0 DRAY_NODE_NAME=node1"),
    ),
    "a number outside": (("2", "2", "node1"), _NOT_A_NODE, (_NODES, "DRAY_NODES=2 DRAY_NODE=2 DRAY_NODE_NAME=node1")),
    "every node believes that it is node 0": (
        ("0", "2", "node2"),
        _NOT_A_NODE,
        (_NODES, "DRAY_NODES=2 DRAY_NODE=0 DRAY_NODE_NAME=node2"),
    ),
    "no name": (("0", "2", None), _NOT_A_NODE, (_NODES, "DRAY_NODES=2 DRAY_NODE=0 DRAY_NODE_NAME=")),
}


@pytest.mark.seconds
@pytest.mark.parametrize("case", REFUSALS)
def test_a_node_that_is_not_who_the_plan_expects_stops(case: str, start: Start, tmp_path: Path) -> None:
    identity, why, (wanted, found) = REFUSALS[case]
    code, err = ended(start(*identity))
    assert code == 78
    assert err.splitlines()[:3] == [why, f"  wanted: {wanted}", f"  found:  {found}"]
    record = json.loads((tmp_path / "failures" / f"node-{identity[0] or 'unknown'}.json").read_text())
    assert (record["code"], record["rank"], record["why"]) == (78, None, err.rstrip("\n"))


@pytest.mark.seconds
def test_a_node_that_never_comes_is_named_within_the_deadline(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["rendezvous_timeout_s"] = 1
    before = time.monotonic()
    code, err = ended(start(0, 2, "node1"))
    assert (code, time.monotonic() - before < 10) == (69, True)
    assert err.splitlines()[:3] == [
        "1 of 2 nodes did not reach the first one in 1 s",
        f"  wanted: a connection of every node to 127.0.0.1 port {rendezvous(plan)[1]}",
        "  found:  missing: node2",
    ]


@pytest.mark.seconds
def test_a_master_that_never_comes_is_named_within_the_deadline(plan, start: Start) -> None:
    plan["world"]["rendezvous_timeout_s"] = 1
    code, err = ended(start(1, 2, "node2"))
    assert code == 69
    assert err.splitlines()[0] == "node 1 (node2) could not reach the first node in 1 s"


@pytest.mark.seconds
def test_a_busy_port_is_try_again(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["port"] = free_port()
    with socket.create_server(("", plan["world"]["port"])):
        code, err = ended(start(0, 2, "node1"))
    assert code == 75
    assert err.splitlines()[0] == f"port {plan['world']['port']} is busy on node1"


@pytest.mark.slow
@pytest.mark.seconds
def test_a_busy_port_is_try_again_on_one_node_too(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    plan["world"]["port"] = free_port()
    with socket.create_server(("", plan["world"]["port"])):
        assert ended(start(0, 1, "node1"))[0] == 75


def test_another_plan_stops_all_nodes(plan, start: Start, tmp_path: Path) -> None:
    master = start(0, 2, "node1")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**plan, "command": ["false"]}))
    guest = start(1, 2, "node2", other)
    code, err = ended(master)
    assert (code, err.splitlines()[0]) == (78, "node 1 (node2) has a different plan")
    guest_code, guest_err = ended(guest)
    assert guest_code == 78
    assert "  found:  node 1 (node2) has a different plan" in guest_err
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-0.json"]


def test_a_launcher_that_is_not_there_is_recorded(plan, start: Start, tmp_path: Path) -> None:
    plan["launcher"] = ["no-such-launcher"]
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    code, err = ended(start(0, 1, "node1"))
    why = "the launcher cannot start: no-such-launcher: No such file or directory"
    assert (code, err) == (127, f"{UNBOUND}\n{why}\n")
    assert json.loads((tmp_path / "failures" / "node-0.json").read_text())["why"] == why


def one_node(plan: dict[str, Any], script: str) -> None:
    """A plan of one node, whose launcher is this Python."""
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    plan["launcher"] = [sys.executable, "-c", script]


@pytest.mark.seconds
def test_the_runner_passes_signals_on_once(plan, start: Start, tmp_path: Path) -> None:
    """node.sh signals the engine's group; a launcher in it would hear each signal twice."""
    script = (
        "import os, signal, sys, time\n"
        "heard = []\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))\n"
        "open('ready', 'w').close()\n"
        "while not heard: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "sys.exit(40 + len(heard))"
    )
    one_node(plan, f"import os; os.chdir({str(tmp_path)!r})\n{script}")
    node = start(0, 1, "node1", start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert node.poll() is None
    os.killpg(node.pid, signal.SIGTERM)
    assert ended(node)[0] == 41
    assert not (tmp_path / "failures").exists()  # it was stopped: that is no cause


@pytest.mark.seconds
def test_ranks_and_their_preflight_may_open_many_files(plan, start: Start, tmp_path: Path) -> None:
    """Each idle connection to Gloo's port is a file of its rank's."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, resource, sys\n"
        "started = next((name for name in ('dray.checks.rank', 'launcher') if name in sys.orig_argv), '')\n"
        "network = sys.modules['dray.checks.network'] = type(sys)('dray.checks.network')\n"
        "network.suite = lambda *_: {}\n"
        "if started:\n"
        f"    with open(f'{tmp_path}/{{started}}.files', 'w') as told:\n"
        "        told.write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))\n"
    )
    one_node(plan, "")
    fabric = {"kind": "unknown", "strategy": "none", "libraries": [], "plugin": "", "transport": []}
    plan |= {"variant": "cpu", "site": "site s", "fabric": fabric}
    plan["preflight"] = {"timeout_s": 60, "megabytes": 1, "free_gb": 0, "shared_memory_gb": 0, "memory_gb": 0}
    plan["launcher"] = [sys.executable, "-c", "", "launcher"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        node = start(0, 1, "node1", PYTHONPATH=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    code, said = ended(node)
    assert code == 0, said
    allowed = str(min(hard, 65_536))
    seen = {path.name: path.read_text() for path in tmp_path.glob("*.files")}
    assert seen == dict.fromkeys(("dray.checks.rank.files", "launcher.files"), allowed)


def test_the_store_may_open_as_many_as_the_machine_allows(tmp_path: Path) -> None:
    """Each rank of a run of 75,000 holds a connection."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "distributed.py").write_text(
        "import resource, sys\ndef TCPStore(*_, **__): sys.exit(str(resource.getrlimit(resource.RLIMIT_NOFILE)))"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ended = subprocess.run(
        [sys.executable, "-m", "dray.tcp_store", "127.0.0.1", "0", "0"],
        env={**PYTHON, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.stderr == f"({hard}, {hard})\n"


def test_a_child_ends_if_its_parent_is_killed_before_it_can_notice(tmp_path: Path) -> None:
    """Between fork and the child's request for a signal at the parent's death."""
    script = (
        "import os, signal, time\n"
        "from dray.runner import children\n"
        "def die(*_):\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(0.5)\n"
        "children._prctl = die\n"
        f"children.Children().start(['touch', {str(tmp_path / 'started')!r}])\n"
    )
    parent = subprocess.run([sys.executable, "-c", script], env=PYTHON, check=False)
    time.sleep(1.5)
    assert (parent.returncode, (tmp_path / "started").exists()) == (-signal.SIGKILL, False)


@pytest.mark.parametrize(
    "lines",
    [
        # No more processes are allowed: later signals must arrive all the same.
        "def fork():\n    raise BlockingIOError\n"
        "os.fork = fork\n"
        "try:\n    started.start(['true'])\nexcept BlockingIOError:\n    pass\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        # It ends just before it is asked to save, and its own parent has reaped it.
        "children.handles = lambda *_: True\nstarted._ask([2**22 + 1])",
    ],
)
def test_a_supervisor_goes_on(lines: str) -> None:
    script = f"import os, signal\nfrom dray.runner import children\nstarted = children.Children()\n{lines}"
    subprocess.run([sys.executable, "-c", script], env=PYTHON, check=True)


def test_a_full_disk_does_not_end_what_writes_a_line() -> None:
    """The node's log may be on it."""
    script = (
        "import os\n"
        "from dray.runner import say\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "say('a line')\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script], env=PYTHON, check=True)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 1 << 30, (65_536, 1 << 30)),
        (1 << 20, 1 << 20, None),
    ],
)
def test_how_many_files_ranks_may_open(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised) -> None:
    limits: list[Any] = [None]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    runner.allow_files()
    assert limits[-1] == raised


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        ((), [1], "'list' object is not a mapping"),
        (("attempt",), "1", "plan.attempt is '1', not int"),
        (("command",), None, "plan.command is None, not list"),
        (("command",), ["true", 5], "plan.command is 5, not str"),
        (("env",), [["A", "b"]], "plan.env is ['A', 'b'], not dict"),
        (("preflight",), {"timeout_s": 1.5}, "plan.preflight.timeout_s is 1.5, not int"),
        (("recipe",), None, "plan.recipe is None, not dict"),
        (("recipe", "train"), [], "plan.recipe.train is [], not dict"),
        (("recipe", "hang_timeout_s"), float("nan"), "plan.recipe.hang_timeout_s is nan, not int"),
        (("world", "port"), "x" * 99, f"plan.world.port is '{'x' * 59}, not int"),
        (("world", "size"), True, "plan.world.size is True, not int"),
        (("world", "nodes"), {}, "plan.world.nodes is {}, not list"),
        (("world", "nodes", 1, "name"), 2, "plan.world.nodes.name is 2, not str"),
        (("world", "identity", "cpus"), None, "plan.world.identity.cpus is None, not str"),
        (("world", "shared_folder"), 1, "plan.world.shared_folder is 1, not bool"),
    ],
)
def test_a_plan_with_a_value_of_another_kind_is_refused(
    plan: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: object, found: str
) -> None:
    whole: Any = [plan]
    part, key = whole, 0
    for name in place:
        part, key = part[key], name
    part[key] = value
    (tmp_path / "plan.json").write_text(json.dumps(whole[0]))
    with pytest.raises(ConfigError, match="the plan is damaged") as refused:
        read(str(tmp_path / "plan.json"))
    assert (refused.value.finding.found, refused.value.finding.where) == (found, f"{tmp_path}/plan.json")


def test_the_first_record_of_a_node_is_kept(
    plan: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its exit code and its fix: what fails later may follow from it."""
    monkeypatch.setenv("DRAY_NODE", "0")
    this = runner.Runner(decoded(plan))
    this.record(Finding("the store has ended", fix="start the run again", code=75, node="node1"))
    this.record(Finding("the launcher ended: exit code 9", code=9, node="node1"))
    record = json.loads((tmp_path / "failures" / "node-0.json").read_text())
    assert (record["code"], record["why"]) == (75, "the store has ended\n  fix:    start the run again")


@pytest.mark.parametrize("me", [0, 1])
def test_a_hang_is_recorded_once_on_each_machine(plan: dict[str, Any], me: int) -> None:
    """The first node has recorded it with the frames of the rank, which others do not know."""
    plan["world"]["shared_folder"] = False
    this, cause, records = runner.Runner(decoded(plan, me)), Finding("hang", code=75), list[Finding]()
    this.start = Restart()
    hang = SimpleNamespace(begun=cause, write_record=records.append)
    this.links = SimpleNamespace(hang=hang, lead=lambda _: 75, cause=cause, start=this.start, stopped=True)
    assert (this.lead(), records) == (75, [cause] * me)


def test_a_record_that_a_full_disk_has_cut_short_is_none(plan: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "rank-0.json").write_text('{"time": 1.0, "no')
    assert records.first_failure(decoded(plan)) is None


def test_a_launcher_that_fails_is_recorded_where_no_rank_is(plan, start: Start, tmp_path: Path) -> None:
    one_node(plan, "raise SystemExit(3)")
    assert ended(start(0, 1, "node1"))[0] == 3
    failure = json.loads((tmp_path / "failures" / "node-0.json").read_text())
    assert (failure["code"], failure["node"], failure["why"]) == (3, "node1", "the launcher ended: exit code 3")
    (tmp_path / "failures" / "node-0.json").rename(tmp_path / "failures" / "rank-1.json")
    assert ended(start(0, 1, "node1"))[0] == 3
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["rank-1.json"]


@pytest.mark.parametrize(("later", "named"), [(10.04, 0), (16.0, 1)])
def test_a_rank_that_died_of_another_s_end_is_not_what_a_node_tells(
    plan: dict[str, Any], tmp_path: Path, later: float, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the run's result has it, though its record is older."""
    (tmp_path / "failures").mkdir()
    for rank, time_, code, lines in ((1, 10.0, 1, ["found: Connection reset by peer"]), (0, later, 78, ["x"])):
        told = {"time": time_, "node": "node1", "rank": rank, "code": code, "why": f"exit code {code}", "log": "l"}
        (tmp_path / "failures" / f"rank-{rank}.json").write_text(json.dumps({**told, "last_lines": lines}))
    monkeypatch.setenv("DRAY_NODE_NAME", "node1")
    this = runner.Runner(decoded(plan))
    found = this.failure(1)
    assert (found.rank, found.code) == (named, 1 if named else 78)


@pytest.mark.seconds
def test_a_launcher_is_told_how_many_processes_the_kernel_had_killed(plan, start: Start) -> None:
    """Where this machine counts them; a rank that fails compares."""
    one_node(plan, f"import os; raise SystemExit(os.environ[{records.OOM_KILLS_BEFORE!r}] != {records.oom_kills()!r})")
    assert ended(start(0, 1, "node1"))[0] == 0


def test_a_launcher_that_is_killed_is_recorded_with_the_signal(plan, start: Start, tmp_path: Path) -> None:
    one_node(plan, "import os; os.kill(os.getpid(), 9)")
    assert ended(start(0, 1, "node1"))[0] == 137
    assert json.loads((tmp_path / "failures" / "node-0.json").read_text())["code"] == 137


def test_launcher_and_ranks_end_with_a_runner_that_is_killed(plan, start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    plan["launcher"] = [sys.executable, "-S", "-E", "{ranks}", "1", "2", "0", "127.0.0.1", "1"]
    plan["world"]["size"] = 2
    plan["command"] = ["sh", "-c", f"echo $$ > {tmp_path}/pid-$RANK; exec sleep 60"]
    node = start(0, 1, "node1")
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    while not all(pid.exists() and pid.read_text().endswith("\n") for pid in pids):
        assert node.poll() is None
    ranks = [Path("/proc", pid.read_text().strip()) for pid in pids]
    node.kill()
    deadline = time.monotonic() + 10
    while any(map(runs, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_only_a_node_knows_replaces_whole_words_of_the_launcher_only() -> None:
    template = ("l", "{node_rank}", "x{node_rank}", "{master}", "{port}", "{endpoint}", "{ranks}")
    plan = decoded(planned(Path("/r"), nodes=loopback(*"01234567")), 7)
    words = launcher.argv(plan._replace(launcher=template, command=("{node_rank}",)), "10.0.0.1", 5)
    ranks = RANK.with_name("ranks.py")
    assert words[:7] == ["l", "7", "x{node_rank}", "10.0.0.1", "5", "10.0.0.1:5", str(ranks)]
    assert words[-1] == "{node_rank}"


_GONE = "the program is not in the container"


@pytest.mark.seconds
def test_a_program_that_is_not_in_the_container_is_named(plan, start: Start, tmp_path: Path) -> None:
    plan["command"] = ["python3", "sub/train.py", "--data", "/elsewhere"]
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    code, err = ended(start(0, 1, "node1"))
    assert code == 78
    assert err.splitlines()[:3] == [
        "the program is not in the container: sub/train.py",
        f"  wanted: a file {tmp_path}/sub/train.py",
        "  found:  no such file in the container",
    ]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    for command in (plan["command"], ["true", "meta/model"], ["env", "A=b/c", "train.py"], ["/bin/ls", "/gone"]):
        plan["command"] = command
        assert ended(start(0, 1, "node1"))[0] == 0


@pytest.mark.parametrize(
    ("command", "content", "mode", "said"),
    [
        ("/gone/mytool", None, 0, [f"{_GONE}: /gone/mytool", "  wanted: an executable file /gone/mytool"]),
        ("mytool", None, 0, [f"{_GONE}: mytool", "  wanted: mytool on PATH (/usr/bin:/bin)"]),
        ("./tool", "true", 0o600, [f"{_GONE}: ./tool", "  wanted: an executable file {}"]),
    ],
)
def test_a_command_that_cannot_start_is_named_before_the_preflight(
    plan, start: Start, tmp_path: Path, command: str, content: str | None, mode: int, said: list[str | None]
) -> None:
    if content is not None:
        (tmp_path / "tool").write_text(content)
        (tmp_path / "tool").chmod(mode)
    plan["command"] = [command]
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    code, err = ended(start(0, 1, "node1", PATH="/usr/bin:/bin"))
    assert code == 78
    for line, wanted in zip(err.splitlines(), said, strict=False):
        assert wanted is None or line == wanted.format(f"{tmp_path}/./tool"), err


def test_a_node_with_another_image_stops_all_nodes(start: Start) -> None:
    master, guest = start(0, 2, "node1", DRAY_IMAGE_ID="a" * 32), start(1, 2, "node2", DRAY_IMAGE_ID="b" * 32)
    code, err = ended(master)
    assert (code, err.splitlines()[:3]) == (
        78,
        ["node 1 (node2) has a different image", "  wanted: image aaaaaaaaaaaa", "  found:  image bbbbbbbbbbbb"],
    )
    assert ended(guest)[0] == 78


HELLO = Hello(1, "n2", plan="p", dray="1", image="i", unfit="", time=1000.0)


def test_a_clock_that_is_far_away_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    came = {0: HELLO._replace(node=0, name="n1")}
    assert why_refused(HELLO._replace(time=1007.0), came) is None
    refusal = why_refused(HELLO._replace(time=990.0), came)
    assert (refusal.finding.code, str(refusal).splitlines()[0]) == (
        69,
        "the clock of node 1 (n2) is 10 s away from the first node's",
    )
    other = why_refused(HELLO._replace(dray="2"), came)
    assert (other.finding.code, str(other).splitlines()[0]) == (78, "node 1 (n2) has a different dray")


def test_the_address_is_that_of_the_sites_interface() -> None:
    assert interface_address(["nothsn9", "lo"]) == "127.0.0.1"
    with pytest.raises(UnfitError) as refused:
        interface_address(["hsn0", "hsn1"])
    assert (refused.value.finding.code, str(refused.value).splitlines()[1]) == (69, "  wanted: hsn0 or hsn1")


# Ranks without an agent.


def _tasks(*, cores: dict[str, str]) -> list[dict[str, str]]:
    """What `srun --nodes=3 --ntasks-per-node=2` tells the two tasks of its second node."""
    return [
        {
            **{"SLURM_PROCID": str(2 + local), "SLURM_LOCALID": str(local), "SLURM_NODEID": "1", "SLURM_NNODES": "3"},
            **{"SLURM_NTASKS": "6", "SLURM_NPROCS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS_PER_NODE": "2"},
            **{"SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
            **cores,
        }
        for local in range(2)
    ]


_OF_A_NODE = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "3", "SLURM_NNODES": "3"}


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        ({}, [{}, {}]),
        (_OF_A_NODE, _tasks(cores={})),
        ({**_OF_A_NODE, "SLURM_CPUS_PER_TASK": "9"}, _tasks(cores={"SLURM_CPUS_PER_TASK": "4"})),
        ({**_OF_A_NODE, "SLURM_CPUS_PER_TASK": "1"}, _tasks(cores={"SLURM_CPUS_PER_TASK": "1"})),
    ],
    ids=["without Slurm", "a job", "with cores", "with fewer cores than ranks"],
)
def test_each_rank_gets_what_torch_reads(env: dict[str, str], tasks: list[dict[str, str]], tmp_path: Path) -> None:
    """And in a job what it would have as a task of srun."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    out = tmp_path / "out"
    with out.open("wb") as file:
        subprocess.run(
            [*RANKS, "3", "2", "1", "n1", "5000", sys.executable, "-c", show], stdout=file, env=env, check=True
        )
    worlds = [json.loads(line) for line in out.read_text().splitlines()]
    worlds = [{key: world[key] for key in world if key != "LC_CTYPE"} for world in worlds]
    assert sorted(worlds, key=lambda world: world["RANK"]) == [
        {
            **{"RANK": str(2 + local), "LOCAL_RANK": str(local), "GROUP_RANK": "1", "WORLD_SIZE": "6"},
            **{"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "5000"},
            **tasks[local],
        }
        for local in range(2)
    ]


def test_a_rank_that_dies_ends_the_others_and_its_code_is_kept() -> None:
    script = 'if [ "$LOCAL_RANK" = 1 ]; then exit 7; else exec sleep 60; fi'
    before = time.monotonic()
    ended = subprocess.run([*RANKS, "1", "2", "0", "n1", "5000", "/bin/sh", "-c", script], check=False)
    assert (ended.returncode, time.monotonic() - before < 20) == (7, True)


def test_what_the_job_is_told_every_rank_hears() -> None:
    script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    argv = [*RANKS, "1", "2", "0", "n1", "5000", "/bin/sh", "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout
        assert [started.stdout.readline(), started.stdout.readline()] == ["ready\n", "ready\n"]
        started.send_signal(signal.SIGTERM)
        assert started.wait(20) == 9


# Cores.


@pytest.mark.parametrize(
    ("allowed", "ranks", "nodes", "gpus", "shares"),
    [
        ("0-7", 2, ["0-7"], [], ["0-3", "4-7"]),
        ("0-7", 4, ["0,2,4,6", "1,3,5,7"], [], ["0,2", "4,6", "1,3", "5,7"]),
        ("1-6", 2, ["0-3", "4-7"], [], ["1-3", "4-6"]),
        ("0-7", 2, ["0-3", "4-7"], [1, 0], ["4-7", "0-3"]),
        ("0-7", 4, ["0-3", "4-7"], [1, 0, 1, 0], ["4-5", "0-1", "6-7", "2-3"]),
        ("0-7", 2, ["0-1", "2-3", "4-5", "6-7"], [3, 1], ["6-7", "2-3"]),  # NUMA nodes without a GPU
        ("0-7", 4, ["0-3", "4-7"], [0, 0, 0, 1], ["0", "1", "2", "4-7"]),
        ("0-7", 2, ["0-3", "4-7"], [1, 0, 1, 0], ["0-3", "4-7"]),  # two of four GPUs, and nobody says which
        ("0-7", 2, ["0-3", "4-7"], [-1, -1], ["0-3", "4-7"]),  # one node of memory, as virtual machines have it
        ("0-8", 2, ["0-8"], [], ["0-3", "4-7"]),
        ("0-3", 2, [], [], ["0-1", "2-3"]),
        ("8-9", 2, ["0-1"], [], ["8", "9"]),  # cores that no node of memory names
    ],
)
def test_cores_are_shared_out(allowed: str, ranks: int, nodes: list[str], gpus: list[int], shares: list[str]) -> None:
    homes = {thread: number for number, node in enumerate(nodes) for thread in parse(node)}
    found = launcher.split_cores([[core] for core in parse(allowed)], ranks, homes, gpus)
    assert [render(chain.from_iterable(share)) for share in found] == shares


@pytest.mark.parametrize(
    ("given", "ranks", "shares", "omp"),
    [
        ("8", 2, ["0-1,4-5", "2-3,6-7"], "4"),  # Slurm counts threads
        ("4", 2, ["0-1,4-5", "2-3,6-7"], "2"),  # it counts cores: --hint=nomultithread, --threads-per-core=1
        ("", 2, ["0-1,4-5", "2-3,6-7"], "4"),
        ("4", 3, ["0,4", "1,5", "2,6"], "1"),  # no core's threads in two shares
        ("8", 8, ["0", "4", "1", "5", "2", "6", "3", "7"], "1"),  # fewer cores than ranks
        ("5", 2, [], "2"),  # nothing confines the job, which has 5 of 8
        ("3", 2, [], "1"),
    ],
)
def test_second_threads_in_the_cpuset_leave_no_rank_unbound(
    tmp_path: Path, monkeypatch, given: str, ranks: int, shares: list[str], omp: str
) -> None:
    """Slurm may count cores while the cpuset has both threads of each: that was taken for a job without a cpuset."""
    for cpu in range(8):
        (tmp_path / f"devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True)
        siblings = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings.write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    world = decoded(planned(tmp_path, ranks_per_node=ranks)).world
    monkeypatch.setattr(launcher, "SYS", str(tmp_path))
    found = launcher.core_variables(world, {"DRAY_CPUS": given})
    assert found.get("DRAY_CORES", "") == ";".join(shares)
    assert found["OMP_NUM_THREADS"] == omp


def test_the_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cpus in ((0, "0-1,4-5"), (8, "2-3,6-7")):  # numbers may have gaps
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{number}/cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        (tmp_path / f"devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True)
        threads = f"{cpu % 4},{cpu % 4 + 4}\n"
        (tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").write_text(threads)
    for slot, (kind, vendor, node) in {"03": ("0x030200", "0x10de", 8), "81": ("0x030200", "0x10de", 0)}.items():
        (tmp_path / f"bus/pci/devices/0000:{slot}:00.0").mkdir(parents=True)
        for name, text in {"class": kind, "vendor": vendor, "numa_node": node}.items():
            (tmp_path / f"bus/pci/devices/0000:{slot}:00.0/{name}").write_text(f"{text}\n")
    (tmp_path / "bus/pci/devices/0000:01:00.0").mkdir()
    (tmp_path / "bus/pci/devices/0000:01:00.0/class").write_text("0x020000\n")
    monkeypatch.setattr(launcher, "SYS", str(tmp_path))
    assert launcher._homes() == {0: 0, 1: 0, 4: 0, 5: 0, 2: 8, 3: 8, 6: 8, 7: 8}
    assert launcher.physical_cores(range(8)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert launcher._gpus() == [8, 0]


def test_a_site_s_cores_count_where_the_job_has_all_of_them(monkeypatch) -> None:
    world = decoded(planned(Path("/r"), cores=["2-3", "0-1"])).world
    monkeypatch.setattr(launcher, "SYS", "/nowhere")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert launcher.core_shares(world, 0) == [[[2], [3]], [[0], [1]]]
    assert launcher.core_shares(world, 2) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert launcher.core_shares(world, 4) == [[[0], [1]], [[2], [5]]]
    assert launcher.core_shares(world._replace(ranks_per_node=8), 0) == []


def test_a_rank_moves_to_its_cores(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    told = f"{mine[-1]};{mine[0]}"
    where = "import os; print(sorted(os.sched_getaffinity(0)), 'DRAY_CORES' in os.environ)"
    with kept(tmp_path, sys.executable, "-c", where, LOCAL_RANK="1", DRAY_CORES=told) as rank:
        assert rank.wait(10) == 0
    assert (tmp_path / "logs" / "rank-1.log").read_text() == f"[{mine[0]}] False\n"


def test_a_rank_outside_the_shares_is_not_bound(tmp_path: Path) -> None:
    with kept(tmp_path, "true", LOCAL_RANK="7", DRAY_CORES="0;1") as rank:
        assert rank.wait(10) == 0
    with kept(tmp_path, "true", LOCAL_RANK="0", DRAY_CORES="100000;1") as rank:
        assert rank.wait(10) == 0
    assert "dray: this rank is not bound to its cores: " in (tmp_path / "logs" / "rank-1.log").read_text()


# The supervisor of one rank.


@contextmanager
def kept(folder: Path, *command: str, **env: str):
    (folder / "logs").mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", RANK, folder, "2", "node2", *command],
        env={**PYTHON, "RANK": "1", "WORLD_SIZE": "2", **env},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def record_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "failures" / "rank-1.json").read_text())
    del record["time"]
    evidence = [line.partition(":")[0] for line in record.pop("evidence")]
    assert evidence[:2] == ["disk of the run folder", "/dev/shm"]
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


def test_a_rank_knows_how_often_the_runners_have_started_it_again(tmp_path: Path) -> None:
    """Whatever its launcher says."""
    show = "echo $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $DRAY_RESTARTS"
    with kept(tmp_path, "sh", "-c", show, TORCHELASTIC_RESTART_COUNT="0", DRAY_RESTARTS="2/3") as rank:
        assert rank.wait(10) == 0
    with kept(tmp_path, "sh", "-c", show, TORCHELASTIC_RESTART_COUNT="0") as rank:
        assert rank.wait(10) == 0
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "2 3\n0\n"


def test_a_rank_that_is_killed_is_recorded_with_the_signal(tmp_path: Path) -> None:
    with kept(tmp_path, "sh", "-c", "kill -9 $$") as rank:
        assert rank.wait(10) == 137
    assert (record_of(tmp_path)["code"], record_of(tmp_path)["why"]) == (137, "killed by SIGKILL")


@pytest.mark.parametrize(("rank", "number"), [("unknown", None), ("01", 1), ("²", None)])
def test_a_record_without_the_image_is_valid_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, number: int | None
) -> None:
    """Also of a rank without a number, where the launcher has set none."""
    monkeypatch.delattr("dray.runner.records")
    monkeypatch.setitem(sys.modules, "dray.runner.records", None)
    rank_module._record(str(tmp_path), "node1", rank, "log", 78, "no RANK")
    record = json.loads((tmp_path / "failures" / f"rank-{rank}.json").read_text())
    assert (record["rank"], record["code"], record["why"].partition(";")[0]) == (number, 78, "no RANK")


def test_a_rank_handles_a_closed_pipe_as_its_shell_does(tmp_path: Path) -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and a shell that inherits this cannot undo it: `yes | head` complains."""
    with kept(tmp_path, "grep", "SigIgn", "/proc/self/status") as rank:
        assert rank.wait(10) == 0
    ignored = int((tmp_path / "logs" / "rank-1.log").read_text().split()[1], 16)
    assert [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1] == []


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
        [sys.executable, "-c", launcher, sys.executable, "-S", "-E", RANK, tmp_path, "2", "node2", *command],
        env={**PYTHON, "RANK": "1", "WORLD_SIZE": "2"},
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
    assert (
        record_of(tmp_path)["why"]
        == "the launcher started another world size: RANK=1 WORLD_SIZE=1, the plan has 2 ranks"
    )
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


def test_a_rank_supervisor_loads_almost_nothing() -> None:
    loaded = f"import sys; sys.path.insert(0, {str(RANK.parents[2])!r}); import dray.runner.rank; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-S", "-E", "-c", loaded], capture_output=True, text=True, check=True)
    assert not {"json", "socket", "re"} & set(ended.stdout.split())
