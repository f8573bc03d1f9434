"""All nodes start their ranks again after a failure: the runners do it, whatever the launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dray.contract import heartbeat
from dray.contract.findings import RetryError
from dray.runner import records
from dray.runner.__main__ import remove_locks
from helpers import ROOT
from nodes import Start, decoded, ended, free_port, planned

pytestmark = pytest.mark.hostile("restarts")

RANKS = [sys.executable, "-S", "-E", "{ranks}"]
# Each rank writes down each of its starts; `$die` says in which start which rank dies, and how.
SCRIPT = """
again=$TORCHELASTIC_RESTART_COUNT
echo "$RANK $again/$TORCHELASTIC_MAX_RESTARTS $MASTER_PORT $$" >> starts
{before}
if [ "$RANK $again" = "{dies}" ]; then
  until [ "$(grep -c " $again/" starts)" = "$WORLD_SIZE" ]; do sleep 0.05; done
  {how}
fi
[ "$again" -ge {well} ] || exec sleep 60
"""


def ranks(
    plan: dict[str, Any], *, dies: str = "3 0", how: str = "exit 9", well: int = 1, before: str = "", most: int = 2
) -> None:
    """From the start `well` on ranks end well."""
    world, folder = plan["world"], plan["folder"]
    world["max_restarts"] = most
    plan["launcher"] = [*RANKS, str(len(world["nodes"])), "2", "{node_rank}", "{master}", "{port}"]
    script = SCRIPT.format(dies=dies, how=how, well=well, before=before)
    plan["command"] = ["sh", "-c", f"cd {folder}\n{script}"]


def starts(plan: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """The ports and process ids of each rank's starts."""
    seen: dict[str, list[tuple[str, str]]] = {}
    for line in sorted(Path(plan["folder"], "starts").read_text().splitlines()):
        rank, again, port, pid = line.split()
        seen.setdefault(f"{rank} {again}", []).append((port, pid))
    return seen


def failures(plan: dict[str, Any]) -> dict[str, int]:
    """The codes in the records, by their names."""
    folder = Path(plan["folder"], "failures")
    return {str(path.relative_to(folder)): json.loads(path.read_text())["code"] for path in folder.rglob("*.json")}


def both(start: Start) -> list[tuple[int, str]]:
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    return [ended(node) for node in nodes]


@pytest.mark.seconds
@pytest.mark.parametrize("dies", ["3 0", "0 0"])
@pytest.mark.parametrize("fixed", [False, True])
def test_all_ranks_start_again(plan: dict[str, Any], start: Start, dies: str, fixed: bool) -> None:
    """On another port, unless the recipe says which; a hostfile's machines are told by their connections alone."""
    if fixed:
        plan["world"] |= {"port": free_port(), "shared_folder": False}
    ranks(plan, dies=dies)
    (first, said), (second, _) = both(start)
    seen = starts(plan)
    assert [first, second] == [0, 0], said
    assert sorted(seen) == [f"{rank} {again}/2" for rank in range(4) for again in (0, 1)]
    ports = [{port for name, ones in seen.items() for port, _ in ones if name.endswith(end)} for end in ("0/2", "1/2")]
    assert len(ports[0]) == len(ports[1]) == 1
    assert (ports[0] == ports[1]) == fixed
    assert f"restart-1/rank-{dies[0]}.json" in failures(plan)
    assert all(name.startswith("restart-1/") for name in failures(plan))
    assert ({"restart-1/node-0.json", "restart-1/node-1.json"} <= failures(plan).keys()) == fixed  # on each machine
    node = int(dies[0]) // 2 + 1
    assert f"dray: restart 1 of 2: rank {dies[0]} on node{node}: exit code 9\n" in said


@pytest.mark.slow
@pytest.mark.seconds
def test_a_supervisor_that_is_killed_has_recorded_nothing_and_its_rank_is_named(
    plan: dict[str, Any], start: Start
) -> None:
    ranks(plan, dies="3 0", how="kill -9 $PPID; sleep 60")
    (first, said), _ = both(start)
    assert first == 0, said
    record = json.loads(Path(plan["folder"], "failures/restart-1/rank-3.json").read_text())
    assert (record["node"], record["rank"], record["code"]) == ("node2", 3, 137)
    assert record["why"] == "killed by SIGKILL, or its supervisor was"
    assert "dray: restart 1 of 2: rank 3 on node2: killed by SIGKILL, or its supervisor" in said


@pytest.mark.seconds
def test_a_supervisor_that_is_killed_while_others_fail_has_its_record(plan: dict[str, Any], start: Start) -> None:
    """As by the kernel, for lack of memory; the first node calls to the next start before the record is written."""
    killed = "trap 'kill -9 $PPID' TERM; while :; do sleep 0.05; done"
    ranks(plan, dies="0 0", before=f'[ "$RANK $again" != "3 0" ] || {{ {killed}; }}')
    (first, text), (second, _) = both(start)
    assert (first, second) == (0, 0), text
    assert (failures(plan)["restart-1/rank-0.json"], failures(plan)["restart-1/rank-3.json"]) == (9, 137)


GONE = """
import sys
if 'dray.runner' in sys.orig_argv:
    from dray.contract.findings import RetryError
    from dray.runner import records
    def gone():
        raise RetryError('the image is gone', fix='submit again')
    records.require_image = gone
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("node", "code", "records"),
    [
        (0, 9, {"node-0.json": 9}),  # what would have led to a restart stays the cause
        (1, 75, {"restart-1/node-1.json": 9, "node-1.json": 75}),
    ],
)
def test_a_node_that_fails_between_two_starts_keeps_its_own_cause(
    plan: dict[str, Any], start: Start, tmp_path: Path, node: int, code: int, records: dict[str, int]
) -> None:
    """Of machines that share no folder, each records the cause of the others' end too."""
    plan["world"] |= {"port": free_port(), "shared_folder": False}
    ranks(plan, dies="0 0", well=9)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(GONE)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])}
    nodes = [start(number, 2, f"node{number + 1}", **(path if number == node else {})) for number in range(2)]
    codes, texts = zip(*map(ended, nodes), strict=True)
    assert codes == (code, code), texts
    found = failures(plan)
    assert {name: found[name] for name in found if name.endswith(f"node-{node}.json")} == records
    if node:
        why = json.loads(Path(plan["folder"], "failures", "node-1.json").read_text())["why"]
        assert why == "the image is gone\n  fix:    submit again"


def test_the_heartbeats_of_the_ranks_before_are_removed(tmp_path: Path) -> None:
    """Where a supervisor was killed, a rank that was never started again would be taken for one that was."""
    beat = heartbeat.path(str(tmp_path), 1)
    for left in (beat, heartbeat.socket(beat)):
        Path(left).touch()
    (tmp_path / "beat-2").touch()
    heartbeat.clear(str(tmp_path), [0, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["beat-2"]


def kill_store(plan: dict[str, Any], first: Any) -> None:
    """Once all ranks have begun; until the first node's runner knows."""
    deadline = time.monotonic() + 60
    while not Path(plan["folder"], "starts").exists() or len(Path(plan["folder"], "starts").read_text().split()) < 16:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    (store,) = (one for one in children if b"dray.tcp_store" in Path("/proc", one, "cmdline").read_bytes())
    os.kill(int(store), signal.SIGKILL)
    while Path("/proc", store).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.seconds
@pytest.mark.parametrize("shared", [True, False])
def test_a_training_whose_store_is_killed_starts_again(plan: dict[str, Any], start: Start, shared: bool) -> None:
    """Without it nothing would be saved when the run is asked to end."""
    ranks(plan, dies="none")
    plan["recipe"]["train"] = {"steps": 9}
    plan["world"] |= {"shared_folder": shared, "port": 0 if shared else free_port()}
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    kill_store(plan, nodes[0])
    (first, said), (second, _) = map(ended, nodes)
    assert (first, second) == (0, 0), said
    assert failures(plan)["restart-1/node-0.json"] == 75
    why = "dray: this node's ranks are stopped: the store has ended: killed by SIGKILL\n"
    assert f"{why}  fix:    start the run again; with" in said
    assert "dray: restart 1 of 2: the store has ended: killed by SIGKILL\n" in said


def test_a_program_of_one_s_own_may_not_need_the_store(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    ranks(plan, dies="none", well=0, before="until [ -e end ]; do sleep 0.05; done")
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    kill_store(plan, nodes[0])
    (tmp_path / "end").touch()
    (first, said), (second, _) = map(ended, nodes)
    assert (first, second) == (0, 0), said
    assert "dray: the store has ended: killed by SIGKILL\n" in said


def test_nothing_is_started_again_where_the_image_is_gone(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records.require_image()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(RetryError, match="the image's mount has gone away") as caught:
        records.require_image()
    assert caught.value.finding.code == 75


@pytest.mark.seconds
def test_one_node_starts_its_ranks_again(plan: dict[str, Any], start: Start) -> None:
    plan["world"]["nodes"] = plan["world"]["nodes"][:1]
    plan["world"]["size"] = 2
    ranks(plan, dies="1 0")
    assert ended(start(0, 1, "node1"))[0] == 0
    assert sorted(starts(plan)) == ["0 0/2", "0 1/2", "1 0/2", "1 1/2"]
    assert failures(plan) == {"restart-1/rank-1.json": 9}


@pytest.mark.slow
@pytest.mark.seconds
def test_a_node_whose_ranks_have_ended_well_starts_them_again_too(plan: dict[str, Any], start: Start) -> None:
    """The other node's die after that."""
    one_has_ended = "[ $RANK -lt 2 ] || while [ ! -e ended ]; do sleep 0.05; done"
    ranks(plan, dies="3 0", before=f"{one_has_ended}; [ $RANK -ge 2 ] || {{ touch ended; exit 0; }}")
    assert [code for code, _ in both(start)] == [0, 0]
    assert sorted(starts(plan)) == [f"{rank} {again}/2" for rank in range(4) for again in (0, 1)]


@pytest.mark.seconds
def test_the_last_start_s_records_are_kept_beside_those_before(plan: dict[str, Any], start: Start) -> None:
    ranks(plan, dies="3 0", before='[ "$RANK $again" != "0 1" ] || exit 8', most=1, well=9)
    (first, said), (second, _) = both(start)
    assert (first, second) == (8, 8), said
    found = failures(plan)
    assert (found["restart-1/rank-3.json"], found["rank-0.json"]) == (9, 8)


@pytest.mark.seconds
@pytest.mark.parametrize("code", [69, 78])
def test_what_would_fail_again_is_not_started_again(plan: dict[str, Any], start: Start, code: int) -> None:
    ranks(plan, how=f"exit {code}")
    assert [code for code, _ in both(start)] == [code, code]
    assert {name.split()[1] for name in starts(plan)} == {"0/2"}


def test_a_run_that_is_stopped_is_not_started_again(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    """Though its ranks die of it."""
    ranks(plan, dies="none", before="trap 'exit 3' TERM; touch ready-$RANK; while :; do sleep 0.05; done")
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nodes[1].send_signal(signal.SIGTERM)
    assert [ended(node)[0] for node in nodes] == [3, 3]
    assert {name.split()[1] for name in starts(plan)} == {"0/2"}


def test_a_node_that_is_lost_ends_the_run(plan: dict[str, Any], start: Start) -> None:
    """It cannot come to the next rendezvous."""
    ranks(plan, dies="none", well=9)
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    deadline = time.monotonic() + 60
    while not Path(plan["folder"], "starts").exists() or len(starts(plan)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nodes[1].kill()
    code, said = ended(nodes[0])
    assert (code, "node 1 (node2) is gone" in said) == (75, True), said


@pytest.mark.slow
def test_nothing_of_the_start_before_is_left(plan: dict[str, Any], start: Start) -> None:
    """Not what a rank has started in a session of its own, nor a rank that does not hear SIGTERM."""
    stubborn = "trap '' TERM; setsid sleep 60 & echo $! >> left"
    late = "if [ $again = 1 ]; then for one in $(cat left); do [ ! -e /proc/$one/exe ] || echo $one >> alive; done; fi"
    ranks(plan, before=f"{late}; [ $again = 1 ] || {{ {stubborn}; }}")
    (first, said), (second, _) = both(start)
    assert (first, second) == (0, 0), said
    assert len(Path(plan["folder"], "left").read_text().split()) == 4
    assert not Path(plan["folder"], "alive").exists()


@pytest.mark.seconds
def test_a_signal_to_one_node_between_two_starts_ends_the_run(
    plan: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    """Its launcher has ended, and the first node has called to the next start already."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, signal, sys\nif 'dray.runner' in sys.orig_argv:\n    from dray.runner import records\n"
        "    records.require_image = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    ranks(plan, well=9, before="trap 'exit 3' TERM; touch again-$again")
    began = time.monotonic()
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    nodes = [start(0, 2, "node1"), start(1, 2, "node2", PYTHONPATH=path)]
    codes = [ended(node)[0] for node in nodes]
    assert (time.monotonic() - began < 50, 0 in codes) == (True, False)
    assert -signal.SIGTERM not in codes
    assert {name.split()[1] for name in starts(plan)} <= {"0/2", "1/2"}


SIGNALLED = """
import os, signal, sys
if 'dray.runner' in sys.orig_argv:
    from dray.runner import records
    {}
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    "asks",
    [
        "records.set_aside = lambda *_: os.kill(os.getpid(), signal.SIGUSR1)",
        "records.require_image = lambda: sys._getframe(1).f_locals['links'].ask()",  # with the call to the start
    ],
)
def test_a_node_that_was_asked_to_save_between_two_starts_saves(
    plan: dict[str, Any], start: Start, tmp_path: Path, asks: str
) -> None:
    """The first node has begun the next start by then."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SIGNALLED.format(asks))
    saves = "trap 'exit 75' USR1; [ $again = 0 ] || while :; do sleep 0.05; done"
    ranks(plan, before=saves, most=1)
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    nodes = [start(0, 2, "node1"), start(1, 2, "node2", PYTHONPATH=path)]
    (first, said), (second, _) = [ended(node) for node in nodes]
    assert (first, second) == (75, 0), said
    assert {name.split()[1] for name in starts(plan)} == {"0/1", "1/1"}


@pytest.mark.seconds
@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_while_nodes_wait_for_the_next_start_ends_the_run(
    plan: dict[str, Any], start: Start, tmp_path: Path, signalled: int
) -> None:
    """The ranks of the second node take long to end; the first node's have ended."""
    late = "[ $RANK -lt 2 ] || trap 'touch told; sleep 4; exit 0' TERM; [ $RANK -lt 2 ] || while :; do sleep 0.05; done"
    ranks(plan, dies="0 0", before=late, well=9)
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    deadline = time.monotonic() + 60
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nodes[signalled].send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert [ended(node)[0] for node in nodes] == [9, 9]
    assert time.monotonic() - began < 20
    assert {name.split()[1] for name in starts(plan)} == {"0/2"}


def test_a_record_that_another_node_has_moved_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes move hang.json, and on a slow disk it was there when they looked."""
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "rank-2.json").touch()
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    records.set_aside(decoded(planned(tmp_path), 1), 1)
    assert [path.name for path in (tmp_path / "failures" / "restart-1").iterdir()] == ["rank-2.json"]


def test_a_lock_of_the_ranks_before_is_removed(tmp_path: Path, capsys) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    made = lock.stat().st_mtime
    remove_locks(str(tmp_path), made)
    assert lock.exists()
    remove_locks(str(tmp_path), made + 1)
    assert not lock.exists()
    assert f"dray: removed {lock}" in capsys.readouterr().out
