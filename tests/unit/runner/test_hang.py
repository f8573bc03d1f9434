"""A run that hangs ends within its limit, and names the rank that holds it up: real runners, real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dray.contract import heartbeat
from dray.contract.findings import ConfigError, Finding
from dray.runner import connections, hang, heartbeats
from dray.runner.children import Loop
from dray.runner.connections import Entered, Progress, Seen
from dray.runner.control import FileWatch
from dray.runner.heartbeats import Heartbeats
from dray.runs import local, prepare
from helpers import ROOT, python, until
from nodes import Start, control, decoded, ended, planned

# A program that beats as docs/survive.md shows, waits for the others by files as in a collective, and does once what
# the test says.
*_, BEAT = re.findall("```python\n(.*?)```", (ROOT / "docs" / "survive.md").read_text(), re.DOTALL)
PROGRAM = f"""{BEAT}
import sys
rank, world, does = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def spin():
    while True:
        pass


def collective(step):
    open(f"in-{{again}}-{{step}}-{{rank}}", "w").close()
    while not all(os.path.exists(f"in-{{again}}-{{step}}-{{one}}") for one in range(world)):
        time.sleep(0.01)


for step in range(1, 400):
    print(rank, "takes step", step, flush=True)
    beat(step)
    if step == 20 and rank == 2 and again == "0":
        open("ready", "w").write(str(os.getpid()))
        if does == "spin":
            spin()
        if does == "leave":
            sys.exit(0)
        if does == "stop":
            time.sleep(1)
    if again == "1" and step == 20:
        break
    collective(step)
    time.sleep(0.02)
"""
LIMIT = 2


@pytest.fixture
def hanging(plan: dict[str, Any], tmp_path: Path) -> Callable[..., None]:
    """Two nodes of two ranks, of which rank 2 does this once it has come to step 20."""

    def planned(does: str, program: str = PROGRAM, *, limit: int | None = LIMIT, restarts: int = 0) -> None:
        (tmp_path / "program.py").write_text(program)
        plan["recipe"]["hang_timeout_s"] = limit
        plan["world"]["max_restarts"] = restarts
        plan["launcher"] = [sys.executable, "-S", "-E", "{ranks}", "2", "2", "{node_rank}", "{master}", "{port}"]
        plan["command"] = ["sh", "-c", f"cd '{tmp_path}' && {python()} program.py {does}"]

    return planned


def both(
    start: Start, ready: Path | None = None, then: Callable[[int], None] = lambda _: None, **env: str
) -> tuple[str, float]:
    """What the nodes said, and the seconds from when rank 2 had said that it is ready."""
    nodes = [start(number, 2, f"node{number + 1}", PYTHONFAULTHANDLER="1", **env) for number in range(2)]
    deadline = time.monotonic() + 60
    while ready and not (ready.exists() and ready.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    if ready:
        then(int(ready.read_text()))
    codes, texts = zip(*map(ended, nodes), strict=True)
    assert set(codes) <= {0, 75}, texts
    assert codes[0] == codes[1]
    return "".join(texts), time.monotonic() - began


def record(folder: Path, name: str = "hang.json") -> dict[str, Any]:
    return json.loads((folder / "failures" / name).read_text())


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("does", "what", "shown"),
    [
        pytest.param("spin", "runs, and the others sleep: at step 20, in spin (", "spin", marks=pytest.mark.slow),
        ("stop", "is stopped (SIGSTOP): at step 20, in <module> (", "<module>"),
        pytest.param("leave", "has ended: at step 20", "", marks=pytest.mark.slow),
    ],
)
def test_the_rank_is_named_with_its_frames(
    hanging: Callable[..., None], start: Start, tmp_path: Path, does: str, what: str, shown: str
) -> None:
    hanging(does)
    stop = (lambda pid: os.kill(pid, signal.SIGSTOP)) if does == "stop" else lambda _: None
    text, seconds = both(start, tmp_path / "ready", stop)
    found = record(tmp_path)
    assert (found["node"], found["rank"], found["code"]) == ("node2", 2, 75), text
    assert found["why"].startswith(f"hang: rank 2 on node2 {what}"), text
    assert f"(limit {LIMIT} s)" in found["why"]
    assert LIMIT <= seconds < LIMIT + 10
    assert found["log"] == f"{tmp_path}/hang/rank-2.txt"
    assert shown in "".join(found["last_lines"])
    saved = (tmp_path / "hang" / "rank-2.txt").read_text()
    assert f"in {shown}" in saved or not shown
    assert " in collective" in (tmp_path / "hang" / "rank-0.txt").read_text()
    first = min((tmp_path / "failures").glob("*.json"), key=lambda path: record(tmp_path, path.name)["time"])
    assert first.name == "hang.json"  # the ranks that were ended for it are no cause


@pytest.mark.slow
@pytest.mark.seconds
def test_all_ranks_start_again_and_end_well(hanging: Callable[..., None], start: Start, tmp_path: Path) -> None:
    """A hang is a failure as any other; what is said of it stays beside the restart."""
    hanging("spin", restarts=1)
    text, _ = both(start)
    assert "dray: restart 1 of 1: hang: rank 2 on node2" in text
    assert not list((tmp_path / "failures").glob("*.json"))
    assert record(tmp_path, "restart-1/hang.json")["rank"] == 2
    assert not (tmp_path / "hang" / "restart-1").exists()


SILENT = "import os, sys, time\nfor _ in range(4):\n    print(1, flush=True)\n    time.sleep(1)\n{}"


@pytest.mark.slow
def test_a_command_without_a_heartbeat_makes_progress_while_a_log_grows(
    hanging: Callable[..., None], start: Start, tmp_path: Path
) -> None:
    """Of any rank: most programs have one that writes. Then the one that has no more to say is asked for its stacks."""
    lasts = "def wait():\n    time.sleep(1000)\nif os.environ['RANK'] == '0': wait()\nelse: time.sleep(1000)"
    hanging("nothing", SILENT.format(lasts), limit=2)
    began = time.monotonic()
    text, _ = both(start)
    assert 4 + 2 <= time.monotonic() - began < 4 + 2 + 10
    found = record(tmp_path)
    assert found["why"].startswith("hang: rank 0 on node1 is at another place than the others: in wait ("), text


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 0])
def test_a_command_is_not_watched_unless_the_recipe_says_so(
    hanging: Callable[..., None], start: Start, tmp_path: Path, limit: int | None
) -> None:
    hanging("nothing", SILENT.format(""), limit=limit)
    both(start)
    assert not (tmp_path / "failures").exists()


@pytest.mark.slow
def test_a_command_that_is_no_python_is_named_by_its_state(
    hanging: Callable[..., None], plan: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    hanging("nothing", limit=2)
    plan["command"] = ["sh", "-c", "if [ $RANK = 1 ]; then while :; do :; done; else exec sleep 60; fi"]
    text, seconds = both(start)
    assert seconds < 60
    assert record(tmp_path)["why"].startswith("hang: rank 1 on node1 runs, and the others sleep; rank "), text


# What a node looks at.


def wrote(folder: Path, rank: int, *beat: int, program: int = 1) -> None:
    data = heartbeat.PROGRAM.pack(program) + heartbeat.BEAT.pack(*beat)
    (folder / f"beat-{rank}").write_bytes(data.ljust(heartbeat.SIZE, b"\0"))


def no_log(_: str) -> int:
    return 0


def watched(folder: Path, limit: int | None, size: Callable[[str], int] = no_log) -> Heartbeats:
    """The heartbeat of one rank."""
    plan = planned(folder, ranks_per_node=1) | {"scratch": str(folder)}
    plan["recipe"]["hang_timeout_s"] = limit
    return Heartbeats(decoded(plan), size)


def looked(beats: Heartbeats, begin: int, end: int) -> Any:
    """The last of the looks from one second to another."""
    return [beats.look(float(second)) for second in range(begin, end)][-1]


def test_each_phase_has_the_limit_that_the_rank_gives_it(tmp_path: Path) -> None:
    beats = watched(tmp_path, None)
    wrote(tmp_path, 0, 7, heartbeat.CHECKPOINT, 100, 1)
    assert looked(beats, 0, 101) is None
    late = looked(beats, 101, 103)
    assert (late.rank, late.limit, late.alone) == (0, 100, False)
    wrote(tmp_path, 0, 7, heartbeat.STEP, 10, 2)
    assert looked(beats, 103, 113) is None
    assert looked(beats, 113, 116).alone


def test_time_in_which_the_node_itself_was_stopped_does_not_count(tmp_path: Path) -> None:
    """As by `scontrol suspend`, or in a container that is paused."""
    beats = watched(tmp_path, None)
    wrote(tmp_path, 0, 7, heartbeat.STEP, 10, 1)
    assert looked(beats, 0, 5) is None
    assert looked(beats, 1000, 1011) is None
    assert looked(beats, 1011, 1012) is not None


def test_a_rank_without_a_heartbeat_makes_progress_while_it_writes(tmp_path: Path) -> None:
    sizes = {f"{tmp_path}/logs/rank-0.log": 10}
    beats = watched(tmp_path, 5, sizes.__getitem__)
    wrote(tmp_path, 0, 0, 0, 0, 0, program=os.getpid())
    assert beats.look(1.0) is None
    sizes[f"{tmp_path}/logs/rank-0.log"] = 20
    assert looked(beats, 5, 10) is None
    late = beats.look(11.0)
    assert (late.rank, late.seconds) == (0, 6.0)


def test_time_in_which_the_shared_disk_stalls_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log may grow then, and nobody sees it."""
    stalls, stat = threading.Event(), os.stat

    def stalled(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("rank-0.log") and stalls.is_set():
            until(lambda: not stalls.is_set())
        return stat(path, *more, **named)

    monkeypatch.setattr(os, "stat", stalled)
    monkeypatch.setattr("dray.runner.control._FILE_LOOK_S", 0.05)
    monkeypatch.setattr("dray.runner.control._STALL_S", 0.5, raising=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("step 1\n")
    watch = FileWatch()
    beats = watched(tmp_path, 5, watch.size)
    wrote(tmp_path, 0, 0, 0, 0, 0, program=os.getpid())
    assert looked(beats, 0, 3) is None
    until(lambda: watch.size(f"{tmp_path}/logs/rank-0.log") == 7)
    stalls.set()
    time.sleep(1)
    assert looked(beats, 3, 20) is None
    stalls.clear()
    until(lambda: watch.size(f"{tmp_path}/logs/rank-0.log") == 7)
    assert looked(beats, 20, 25) is None
    assert looked(beats, 25, 28).rank == 0


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 64, bytes(range(192, 256)), b"\0" * 64])
def test_a_heartbeat_that_is_none_is_not_believed(tmp_path: Path, data: bytes) -> None:
    beats = watched(tmp_path, 2)
    (tmp_path / "beat-0").write_bytes(data)
    assert beats.look(1.0) is None


@pytest.mark.seconds
def test_a_rank_that_works_at_its_start_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What prepares data or reads weights may beat for no hour, and uses a CPU; later that is no sign of progress."""
    monkeypatch.setattr(heartbeats, "_WORK_S", 0.05)
    beats = watched(tmp_path, None)
    for phase, late in ((heartbeat.START, False), (heartbeat.CHECKPOINT, True)):
        wrote(tmp_path, 0, 7, phase, 3, 1, program=os.getpid())
        for second in range(6):
            until = time.process_time() + 0.1
            while time.process_time() < until:
                pass
            found = beats.look(float(second))
        assert (found is not None) is late
        beats._seen.clear()


def test_what_a_program_writes_stays_within_its_bounds(tmp_path: Path) -> None:
    """Any program may write there."""
    beats = watched(tmp_path, None)
    wrote(tmp_path, 0, -7, 99, 1, 1)
    assert looked(beats, 0, 4).alone
    assert heartbeats.of(beats._plan, 0)[1:4] == (-7, heartbeat.STEP, 1)
    wrote(tmp_path, 0, (1 << 63) - 1, -1, -(1 << 63), -1)
    assert looked(beats, 4, 8) is None  # it has no limit


@pytest.mark.parametrize("whose", ["first", "own", "parent", "orphan"])
def test_a_process_that_is_no_rank_of_this_node_is_left_alone(tmp_path: Path, whose: str) -> None:
    """As where a program writes its step where its process id stands."""
    starts = "sleep 60 >/dev/null 2>&1 & echo $!"
    orphan = int(subprocess.run(["sh", "-c", starts], capture_output=True, check=True).stdout)
    program = {"first": 1, "own": os.getpid(), "parent": os.getppid(), "orphan": orphan}[whose]
    try:
        wrote(tmp_path, 0, 1, heartbeat.STEP, 0, 1, program=program)
        seen = [Seen(0, "node1", state="unseen")]
        plan = decoded(planned(tmp_path))._replace(scratch=str(tmp_path))
        hang.save_stacks(seen, 0, plan, str(tmp_path / "rank-0.txt"), time.monotonic())
        assert (seen[0].state, seen[0].frames) == ("", ())
        os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_the_python_below_a_shell_with_a_trap_is_found() -> None:
    """bash handles SIGABRT for a trap of EXIT, and writes no stack."""
    program = f"{python()} -X faulthandler -c 'print(1, flush=True); import time; time.sleep(60)'"
    argv = ["bash", "-c", f"trap : EXIT; {program}; true"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as shell:
        assert shell.stdout
        shell.stdout.readline()
        (found,) = hang._pythons(shell.pid)
        assert found != shell.pid
        os.killpg(shell.pid, signal.SIGKILL)


def test_a_phase_in_which_others_wait_hangs_only_where_nobody_makes_progress(plan: dict[str, Any]) -> None:
    """One rank tokenizes for an hour, and all others wait for it."""
    told: list[Any] = []
    watch = hang.Hang(decoded(plan), 0, no_log, told.append)
    late = heartbeats.Late(2, False, 4000.0, 3600.0)
    watch.hear(Progress(5.0))
    watch.hear(late)
    assert (watch.begun, told) == (None, [])
    watch._progress -= 3700
    watch.hear(late)
    assert told[0].finding.problem == "hang: rank 2 on node2 has made no progress for 4000 s (limit 3600 s)"


@pytest.mark.parametrize("failed", [False, True])
def test_what_waits_for_ranks_that_have_failed_does_not_hang(plan: dict[str, Any], failed: bool) -> None:
    """What a node has told of its ranks may come once the first node knows why the run ends."""
    first, other = socket.socketpair()
    with first, other:
        links = control(plan, {1: connections.Connection(first)}, loop := Loop())
        if failed:
            links.cause = Finding("rank 0 has failed", code=1)
        connections.Connection(other).send(heartbeats.Late(2, True, 9.0, 1.0))
        loop.look(1.0)
    assert (bool(links.hang.begun), links.cause.code) == ((False, 1) if failed else (True, 75))


# Who it is.

GATHER = "all_reduce (torch/distributed/distributed_c10d.py:2500)"
WRAPPER = "wrapper (torch/distributed/c10d_logger.py:81)"
BACKWARD = "_engine_run_backward (torch/autograd/graph.py:824)"


def ranks(*given: dict[str, Any]) -> list[Seen]:
    return [Seen(**{"rank": rank, "node": f"n{rank}", "state": "sleeps", **one}) for rank, one in enumerate(given)]


WAITS = {"frames": (GATHER, WRAPPER, "main (/y/train.py:9)"), "step": 5}
AT = f"in {GATHER}, called by main (/y/train.py:9)"
NCCL, GLOO = Entered("0", 9, "all_reduce", waits=True, backend="nccl"), Entered("0", 3, "barrier", backend="gloo")
ODD = {
    "a stack in no collective": (
        [WAITS, {"frames": ("read (/y/data.py:3)", "main (/y/train.py:8)"), "step": 5}, WAITS],
        1,
        "waits in no collective: at step 5, in read (/y/data.py:3), called by main (/y/train.py:8); waiting in "
        "all_reduce: 2 ranks",
    ),
    "in the backward pass, asleep, all but one": (
        [{"frames": (BACKWARD,)}, {"frames": (BACKWARD,)}, {"frames": (BACKWARD,), "state": "runs"}],
        2,
        f"waits in no collective: in {BACKWARD}; waiting in the backward pass: 2 ranks",
    ),
    "another collective": (
        [WAITS, {"frames": (GATHER.replace("all_reduce", "barrier"), "main (/y/train.py:9)"), "step": 5}],
        1,
        f"waits in another collective: at step 5, {AT.replace('all_reduce', 'barrier')}; waiting in all_reduce: "
        "1 rank; waiting in barrier: 1 rank",
    ),
    "a step behind": (
        [WAITS, {**WAITS, "step": 4}, WAITS],
        1,
        f"is behind the others, which are at step 5: at step 4, {AT}; waiting in all_reduce: 3 ranks",
    ),
    "the Flight Recorder knows best": (
        [
            {**WAITS, "flight": (Entered("0", 9, "all_reduce", waits=True),)},
            {**WAITS, "flight": (Entered("0", 8, "broadcast"),), "step": 6},
        ],
        1,
        "has last entered broadcast, collective 8 of group 0, and others all_reduce, collective 9: at step 6, "
        f"{AT}; waiting in all_reduce: 2 ranks",
    ),
    "another collective of one number": (
        [
            {**WAITS, "flight": (Entered("0", 9, "all_reduce", waits=True),)},
            {**WAITS, "flight": (Entered("0", 9, "barrier", waits=True),)},
        ],
        1,
        "has last entered barrier, collective 9 of group 0, and others all_reduce, collective 9: at step 5, "
        f"{AT}; waiting in all_reduce: 2 ranks",
    ),
    "a group in which nobody waits shows nothing": (
        [{**WAITS, "flight": (Entered("1", 9, "gather"),)}, {**WAITS, "flight": (Entered("1", 8, "gather"),)}],
        None,
        f"no rank differs from the others: at step 5, {AT}; waiting in all_reduce: 2 ranks",
    ),
    "one that has ended a collective sooner is no culprit": (
        [
            {**WAITS, "flight": (Entered("0", 9, "all_reduce", waits=True),)},
            {**WAITS, "flight": (Entered("0", 9, "all_reduce"),)},
        ],
        None,
        f"no rank differs from the others: at step 5, {AT}; waiting in all_reduce: 2 ranks",
    ),
    "each backend of a group numbers its own collectives": (
        [
            {**WAITS, "flight": (GLOO, NCCL)},
            {**WAITS, "flight": (GLOO._replace(number=2), NCCL)},
            {**WAITS, "flight": (GLOO, NCCL._replace(number=8, waits=False))},
        ],
        2,
        "has last entered all_reduce, collective 8 of group 0, and others all_reduce, collective 9: at step 5, "
        f"{AT}; waiting in all_reduce: 3 ranks",
    ),
    "one rank without others": (
        [{"frames": ("read (/y/data.py:3)",), "step": 5}],
        0,
        "waits in no collective: at step 5, in read (/y/data.py:3)",
    ),
    "one rank that is stopped": ([{"state": "stopped", "step": 5}], 0, "is stopped (SIGSTOP): at step 5"),
    "a node that does not answer": (
        [WAITS, {"state": "unseen"}, {"state": "unseen"}],
        1,
        "was not seen: its node did not answer; waiting in all_reduce: 1 rank",
    ),
    "another phase": (
        [{"phase": "start", "step": 0}, {"phase": "checkpoint", "step": 5}],
        0,
        "is behind the others, which are at step 5: at step 0, in phase start",
    ),
    "all alike": (
        [WAITS, WAITS],
        None,
        f"no rank differs from the others: at step 5, {AT}; waiting in all_reduce: 2 ranks",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_the_odd_rank(case: str) -> None:
    given, rank, what = ODD[case]
    found, why = hang.find_culprit(ranks(*given))
    assert (found.rank if found else None, why) == (rank, what)


def test_the_last_collective_of_each_backend_is_kept() -> None:
    """In a group of `cpu:gloo,cuda:nccl` both have its name."""
    entries = [
        {"process_group": ["0", "default_pg"], "collective_seq_id": number, "profiling_name": name, "retired": False}
        for number, name in ((8, "nccl:all_reduce"), (2, "gloo:barrier"), (9, "nccl:all_gather"))
    ]
    assert hang.entered_last(entries) == [
        Entered("0", 9, "all_gather", waits=True, backend="nccl"),
        Entered("0", 2, "barrier", waits=True, backend="gloo"),
    ]


# What is set.


@pytest.mark.parametrize("value", ["-1", "604801", "1.5", "soon", "true", '""', "[]", "{}", "nan", "1e3"])
def test_a_limit_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare.read_recipe(ROOT / "recipes" / "smoke-cpu.toml", [f"hang_timeout_s={value}"])
    assert "hang_timeout_s" in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ((), "a step may take ten times the slowest one, at least 600 s; compiling, saving or"),
        (("hang_timeout_s=60",), "a step may take 60 s (hang_timeout_s); compiling, saving or"),
        (("hang_timeout_s=0",), "never: hang_timeout_s = 0"),
    ],
)
def test_the_plan_says_when_a_run_counts_as_hung(tmp_path: Path, settings: tuple[str, ...], why: str) -> None:
    recipe = prepare.read_recipe(ROOT / "recipes" / "smoke-cpu.toml", settings)
    facts = local.facts(recipe, engine="bare", image=sys.executable, nodes=1, gpus_per_node=0, site="")
    assert prepare.write(recipe, facts, runs=tmp_path)[0].reasons["hang"].startswith(why)
