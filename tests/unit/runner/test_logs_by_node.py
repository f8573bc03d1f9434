"""A run of many ranks has a log for each node, with the rank before each line, and no file for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.contract import heartbeat, rank_lines
from dray.contract.findings import Finding
from dray.runner import channel, evidence, first, output, record
from dray.runner.beats import Beats
from dray.runner.gathered import Gathered
from dray.runs import logs, rank_log, why
from dray.runs.follow import Output
from dray.runs.paths import RunPaths
from dray.runs.rank_log import RankLog
from dray.runs.result import summary
from helpers import ROOT
from nodes import ended, plan, start  # noqa: F401  fixtures

FAILS = """
echo "rank $RANK begins"
[ $RANK = 3 ] || exec sleep 600
for rank in 0 1; do until grep -qs "rank $rank begins" "$DRAY_RUN/attempt-1/logs/node-0.log"; do sleep 0.1; done; done
until grep -qs "rank 2 begins" "$DRAY_RUN/attempt-1/logs/node-1.log"; do sleep 0.1; done
seq 30
echo "why it fails" >&2
exit 42
"""
RUN = [sys.executable, "-m", "dray", "run", "launcher=python", "name=talk", "nodes=2", "ranks_per_node=2"]
RUN += ["preflight.when=never", "runs.logs_by_node_above=3", "--run=mine"]


def many(world: dict[str, Any]) -> dict[str, Any]:
    return {**world, "logs_by_node": True}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, str]:
    """Two nodes of two ranks, of which the last fails; and what was shown."""
    folder = tmp_path_factory.mktemp("many")
    env = {**os.environ, "TMPDIR": "/tmp"}
    done = subprocess.run([*RUN, "--", "sh", "-c", FAILS], cwd=folder, env=env, stdout=-1, stderr=-2, text=True)  # noqa: PLW1510
    assert done.returncode == 42, done.stdout
    return RunPaths(folder / "runs" / "mine"), done.stdout


@pytest.mark.torch
def test_a_rank_that_fails_is_named_with_its_last_lines(failed: tuple[RunPaths, str]) -> None:
    paths, shown = failed
    log = paths.logs / "node-1.log"
    words = [f"  | {line}" for line in [*range(20, 31), "why it fails"]]
    assert shown.splitlines() == [
        f"run folder: {paths.run}",
        "talk: 4 ranks on 2 nodes (bare); rank 0 is shown here, the logs of all are in attempt-1/logs",
        "rank 0 begins",
        "failed: rank 3 on node2: exit code 42",
        *words,
        f"  log: {log}",
        f"run folder: {paths.run}",
        "exit code: 42",
    ]
    report = why.look(paths)
    assert report.cause
    assert (report.cause.rank, report.cause.node, report.cause.log) == (3, "node2", str(log))
    assert report.cause.last_lines == [*map(str, range(12, 31)), "why it fails"]


@pytest.mark.torch
def test_no_rank_has_a_file_of_its_own(failed: tuple[RunPaths, str]) -> None:
    paths, _ = failed
    found = {str(path.relative_to(paths.folder)) for path in paths.folder.rglob("*") if path.parent != paths.folder}
    records = {path for path in found if path.startswith("failures/")}
    assert found - records == {"logs/node-0.log", "logs/node-1.log", "nodes/nodes.jsonl"}
    assert "failures/rank-3.json" in records
    assert len(records) < 3
    told = [json.loads(line) for line in (paths.nodes / "nodes.jsonl").read_text().splitlines()]
    assert {(one["node"], one["name"]) for one in told} == {(0, "node1"), (1, "node2")}
    assert {one["name"] for one in json.loads(paths.capsule.read_text())["nodes"]} == {"node1", "node2"}


@pytest.mark.torch
def test_logs_show_a_rank_alone_and_all_by_name(failed: tuple[RunPaths, str]) -> None:
    paths, _ = failed

    def shown(**chosen: int) -> list[tuple[str, bytes]]:
        found = logs.of(paths, each=2, by_node=True, **chosen)
        return [(log.label, line) for log, line in logs.joined(found, paths)]

    assert shown(rank=1) == [("rank 1", b"rank 1 begins")]
    assert [line for _, line in shown(rank=3)] == [
        b"rank 3 begins",
        *(b"%d" % one for one in range(1, 31)),
        b"why it fails",
    ]
    assert shown(rank=3, node=0) == shown(rank=4) == []
    assert {label for label, _ in shown(node=0)} == {"node 0", "rank 0", "rank 1"}
    assert {label for label, _ in shown()} == {"node 0", "node 1", "rank 0", "rank 1", "rank 2", "rank 3"}


@pytest.mark.torch
def test_the_words_of_a_finished_run_find_the_rank_s_log(failed: tuple[RunPaths, str]) -> None:
    paths, _ = failed
    assert rank_log.find(paths.folder, 3) == RankLog(paths.logs / "node-1.log", 3)
    (paths.failures / "rank-2.json").write_text("{")
    try:
        damaged = why.look(paths).warnings
        assert damaged[0].startswith(f"{paths.failures}/rank-2.json cannot be read: ")
        assert "rank 2 on" not in summary(why.read_result(paths, []), paths)
    finally:
        (paths.failures / "rank-2.json").unlink()


def test_each_line_is_written_whole_with_the_rank_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    between = output.Filter({"secret of mine": "A"}, rank_lines.prefix(7))
    for piece in (b"one\ntw", b"o secret of", b" mine\n\n", b"x" * 9000, b"y\nno end"):
        os.write(between.writer, piece)
        between.pass_on()
    os.close(between.writer)
    between.finish()
    os.close(between.reader)
    lines = ["one", "two [A]", "", "x" * 9000, "y", "no end"]
    assert capfd.readouterr().out == "".join(f"rank 7 | {line}\n" for line in lines)
    assert between.read == sum(map(len, ("one\ntw", "o secret of", " mine\n\n", "y\nno end"))) + 9000


def test_a_rank_s_last_lines_are_found_behind_a_flood(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    flood = "rank 1 | noise, rank 2 | noise\n" * 40_000
    log.write_text(f"rank 2 | first\nrank 2 | second\n{flood}rank 22 | another\n")
    assert rank_lines.tail(log, 2) == ["first", "second"]
    assert rank_lines.tail(log, 22, 1) == ["another"]
    assert rank_lines.tail(log, 3) == rank_lines.tail(tmp_path / "none", 2) == []


def test_what_a_rank_prints_is_followed_in_its_node_s_log(tmp_path: Path, capfdbinary) -> None:
    log = tmp_path / "node-0.log"
    log.write_bytes(b"dray: begun\nrank 0 | on")
    shown = Output(RankLog(log, 0))
    shown.look()
    assert shown.empty
    with log.open("ab") as file:
        file.write(b"e\nrank 10 | other\nrank 0 | two \xc3\n")
    shown.look()
    assert capfdbinary.readouterr().out == b"one\ntwo \xc3\n"


def test_a_rank_without_a_heartbeat_makes_progress_while_it_writes(tmp_path: Path) -> None:
    beats = Beats("", str(tmp_path), range(1), 5, 0.0)
    beat = Path(heartbeat.path(str(tmp_path), 0))

    def written(count: int) -> None:
        data = bytearray(heartbeat.SIZE)
        heartbeat.PROGRAM.pack_into(data, 0, os.getpid())
        heartbeat.WRITTEN.pack_into(data, heartbeat.WRITTEN_AT, count)
        beat.write_bytes(data)

    written(10)
    assert beats.look(1.0) is None
    written(20)
    assert beats.look(5.0) is None
    assert beats.look(9.0) is None
    late = beats.look(11.0)
    assert late
    assert (late.rank, late.seconds) == (0, 6.0)


@pytest.mark.seconds
def test_of_many_records_only_the_first_of_a_node_are_on_the_shared_disk(tmp_path: Path) -> None:
    folder, own = tmp_path / "shared", tmp_path / "own"
    for rank in range(140):
        at = f"{own}-{rank // 2}"
        record.write(str(folder), f"rank-{rank}", own=at, node=f"n{rank // 2}", rank=rank, code=1, why="x", log=None)
    found = {path.name for path in (folder / "failures").iterdir()}
    assert found == {f"rank-{rank}.json" for rank in range(0, 128, 2)}
    assert json.loads(Path(f"{own}-69/failures/rank-139.json").read_text())["rank"] == 139
    record.forget(f"{own}-0", "n0", ["rank-0", "rank-1"])
    assert not [*Path(f"{own}-0/failures").iterdir()]


@pytest.mark.seconds
def test_the_record_of_the_rank_that_the_others_died_of_is_brought(tmp_path: Path) -> None:
    """Its supervisor was the slower one to write, and on the shared disk only the first one of a node writes."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [172.18.0.2]:17826."
    world = {"nodes": [{"name": "n0"}], "ranks_per_node": 2, "logs_by_node": True}
    told = {"own": str(own), "node": "n0", "log": None}
    record.write(str(shared), "rank-1", time=9.99, rank=1, code=1, why="exit code 1", last_lines=[gloo], **told)
    record.write(str(shared), "rank-0", time=10.0, rank=0, code=137, why="killed", last_lines=["step 7"], **told)
    assert [*records(shared)] == ["rank-1.json"]
    for crowd in range(2, 100):
        record.write(str(shared), f"rank-{crowd}", own=f"{own}-{crowd}", node=str(crowd), log=None)
    assert len(records(shared)) == 64
    found = first.failure({"folder": str(shared), "scratch": str(own), "world": world}, 0)
    assert found
    assert (found["rank"], records(shared)["rank-0.json"]["code"]) == (0, 137)
    # Nor is it too many where all fail by themselves.
    (shared / "failures" / "rank-0.json").unlink()
    for number in range(100, 165):
        (shared / "failures" / f"rank-{number}.json").touch()
    first.failure({"folder": str(shared), "scratch": str(own), "world": world}, 0)
    assert not (shared / "failures" / "rank-0.json").exists()


def test_a_record_has_the_time_at_which_the_end_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To collect evidence takes a while: a peer of the rank that has died may be the quicker one."""
    clock = iter([10.0, 20.0])
    monkeypatch.setattr(record, "time", SimpleNamespace(time=lambda: next(clock)))
    monkeypatch.setattr(evidence, "collect", lambda *_: [f"at {next(clock)}"])
    record.write(str(tmp_path), "node-0", node="n0", rank=None, code=1, why="x", log=None, last_lines=[])
    found = records(tmp_path)["node-0.json"]
    assert (found["time"], found["evidence"]) == (10.0, ["at 20.0"])


# The preflight's ranks as they are, but for what needs torch: `suite` is planted.
PLANT = """
import os, sys, time, types
from dray.contract.findings import UnfitError
def suite(rank, log):
    rank.phase("all-reduce")
    rank.deadline(rank.plan["preflight"]["timeout_s"])
    SUITE
    rank.phase("done")
    return {}
planted = types.ModuleType("dray.checks.collectives")
planted.suite = suite
sys.modules["dray.checks.collectives"] = planted
"""


@pytest.fixture
def prove(plan: dict[str, Any], start: Callable[..., Any], tmp_path: Path) -> Callable[..., list[tuple[int, str]]]:  # noqa: F811
    """Both nodes through their preflight, where each rank runs this line of Python."""
    plan["world"] = many(plan["world"])
    plan |= {"variant": "cpu", "site": "site s", "fabric": {"strategy": "none"}}
    plan["preflight"] = {"timeout_s": 60, "megabytes": 1, "free_gb": 0, "shared_memory_gb": 0, "memory_gb": 0}
    plan["launcher"] = ["true"]

    def both(line: str, **limits: int) -> list[tuple[int, str]]:
        plan["preflight"] |= limits
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(PLANT.replace("SUITE", line))
        path = os.pathsep.join([str(site), str(ROOT / "src")])
        nodes = [start(node=number, name=f"node{number + 1}", PYTHONPATH=path) for number in range(2)]
        return [ended(node) for node in nodes]

    return both


def records(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in (folder / "failures").glob("*.json")}


@pytest.mark.seconds
def test_a_preflight_of_many_ranks_leaves_its_report_alone(prove: Callable[..., Any], tmp_path: Path) -> None:
    for code, shown in prove("print('I am', rank.number)"):
        assert code == 0, shown
        assert "dray: preflight took " in shown
        assert "rank 0 | I am 0" in shown or "rank 3 | I am 3" in shown
    assert [path.name for path in (tmp_path / "preflight").iterdir()] == ["report.json"]
    assert records(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.seconds
def test_a_rank_s_finding_is_every_node_s_and_recorded_once(prove: Callable[..., Any], tmp_path: Path) -> None:
    line = "if rank.number == 3: raise UnfitError('a library is missing', node=rank.node, rank=3)\n    time.sleep(600)"
    first, second = prove(line, timeout_s=300)
    assert (first[0], second[0]) == (69, 69), (first, second)
    assert "\na library is missing\n" in first[1]
    assert "found:  a library is missing" in second[1]
    found = records(tmp_path)
    assert list(found) == ["node-0.json"]
    assert (found["node-0.json"]["node"], found["node-0.json"]["rank"]) == ("node2", 3)


@pytest.mark.seconds
def test_a_rank_that_hangs_is_named_by_what_all_have_told(prove: Callable[..., Any], tmp_path: Path) -> None:
    line = "if rank.number != 2: rank.phase('bandwidth')\n    time.sleep(600)"
    first, second = prove(line, timeout_s=2)
    for code, shown in (first, second):
        assert code == 69, shown
        assert "rank 2 on node2 did not answer in 2 s" in shown
        assert "stopped in: all-reduce; the others waited in: bandwidth" in shown
    assert "rank 2 | Timeout (0:00:02)!" in second[1]
    assert "see logs/node-*.log in the run folder, for where each rank stood" in first[1]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_at_once(prove: Callable[..., Any]) -> None:
    first, second = prove("if rank.number == 2: os.kill(os.getpid(), 9)\n    time.sleep(600)", timeout_s=300)
    for code, shown in (first, second):
        assert code == 69, shown
        assert "rank 2 on node2 was killed by SIGKILL" in shown


@pytest.mark.parametrize(
    "message",
    [
        {"about": 7}, {"preflight": {}}, {"preflight": [1]}, {"preflight": [{}]}, {"preflight": [{"rank": True}]},
        {"preflight": [{"rank": [2]}]}, {"preflight": [{"rank": 0}]}, {"preflight": [{"rank": 4}]},
        {"preflight": [{"rank": 2, "finding": {"problem": 1}}]}, {"preflight": [{"rank": 2}, {"rank": 2}]},
    ],
)  # fmt: skip
def test_a_message_of_another_kind_is_refused(plan: dict[str, Any], message: dict[str, Any]) -> None:  # noqa: F811
    heard = Gathered({**plan, "world": many(plan["world"])})
    with pytest.raises(channel.BrokenError):
        heard.hear(1, message)
    assert (heard.nodes, heard.decided) == (set(), False)


def test_nothing_that_a_node_tells_is_taken_for_more_than_a_text(plan: dict[str, Any]) -> None:  # noqa: F811
    heard = Gathered({**plan, "world": many(plan["world"])})
    told = {"rank": 2, "node": "n99", "phase": "x" * 5000, "order": "1", "expired": "yes", "crashed": ["y"], "more": 1}
    heard.hear(1, {"preflight": [told, {"rank": 3, "finding": Finding("p", code=69)._asdict()}]})
    found = heard.ranks()
    assert found[2] == {
        "rank": 2, "node": "node2", "phase": "x" * 1000, "order": -1, "limit": 0, "time": 0, "expired": False,
        "crashed": "['y']",
    }  # fmt: skip
    assert (found[3]["finding"]["problem"], heard.decided, heard.nodes) == ("p", True, {1})
