"""How long each part of a start took: by one clock of a node, over the control connections, in one file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dray.cli import runs
from dray.contract import heartbeat, node_start
from dray.runner.children import Loop
from dray.runner.connections import Restart
from dray.runner.control import StartTimings
from dray.runs import metrics
from dray.runs.metrics import Spent
from dray.runs.status import State
from dray.runs.store import RunPaths
from helpers import ROOT
from nodes import Start, control, decoded, ended

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
CLOCK = ROOT / "src/dray/render/bash/start_times.sh"
SECOND = 1_000_000_000


class TestBeforeTheRunner:
    """What node.sh and the batch script tell, in a variable that anybody may have set to anything."""

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("boot=b began=10.00", {"container": 5.5}),
            ("boot=b began=10.00 staging=10.50 staged=13.75", {"stage": 3.25, "container": 2.25}),
            (
                "boot=b asked_boot=b begun=4.00 planned=8.00 asked=8.50 began=10.00",
                {"plan": 4.0, "srun": 1.5, "container": 5.5},
            ),
            (
                "boot=b asked_boot=b begun=1.00 planned=2.00 asked=8.50 began=10.00 staging=10.00 staged=10.25",
                {
                    "plan": 1.0,
                    "srun": 1.5,
                    "sbcast": 6.5,
                    "stage": 0.25,
                    "container": 5.25,
                },  # sbcast sends it before srun
            ),
            (
                "boot=b asked_boot=other begun=4.00 planned=8.00 asked=8.50 began=10.00",
                {"container": 5.5},
            ),  # not the first node
            ("boot=other began=10.00", {}),  # Docker on another machine: another clock
            ("boot=b began=16.00", {}),  # after the runner
            ("boot=b began=10.00 staging=13.00 staged=11.00", {"container": 5.5}),
            ("boot=b began=14.00 staging=1.00 staged=9.00", {"stage": 8.0}),  # longer than all of it
            ("boot=b began=-1", {}),
            ("boot=b began=nan", {}),
            ("boot=b began=1e3", {}),
            ("boot=b began=" + "9" * 400, {}),
            ("boot=b began=\u0661", {}),
            ("boot= began=10.00", {}),
            ("= == began boot", {}),
            ("", {}),
        ],
    )
    def test_parts(self, text: str, parts: dict[str, float]) -> None:
        assert node_start.parts_before_runner(text, "b", 15.5) == parts

    def test_where_no_kernel_tells_its_start(self) -> None:
        assert node_start.parts_before_runner("boot= began=10.00", "", 15.5) == {}

    def test_bash_reads_the_clock_of_the_runner(self) -> None:
        script = f'set -euo pipefail\nsource "{CLOCK}"\nnode::now staging\nnode::now staged\necho "$started"'
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        done = subprocess.run(
            ["bash", "-c", script], env={"DRAY_ASKED": f"asked_boot={BOOT} begun=1 asked=2"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        after = time.clock_gettime(time.CLOCK_BOOTTIME)
        words = dict(word.split("=") for word in done.stdout.split())
        at = [float(words.pop(name)) for name in ("began", "staging", "staged")]
        assert words == {"boot": BOOT, "asked_boot": BOOT, "begun": "1", "asked": "2"}
        assert at == sorted(at)
        assert before - 0.02 <= at[0]  # /proc/uptime has hundredths
        assert at[-1] <= after


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stage": 1.23456, "import": 2}, {"stage": 1.235, "import": 2.0}),
        ({"stage": -1, "import": float("nan"), "compile": float("inf"), "model": 1e9, "container": 1e7}, {}),
        ({"stage": "1", "import": None, "compile": True, "model": [1]}, {}),
        ({"queue": 4, "other": 5, "tflops": 612.5}, {"tflops": 612.5}),  # Slurm alone tells the queue
        ([1], {}),
        (None, {}),
    ],
)
def test_what_is_no_duration_is_left_out(given: object, kept: dict[str, float]) -> None:
    assert node_start.valid_parts(given) == kept


def beat(folder: Path, rank: int, *marks: int) -> None:
    """A heartbeat with these marks, as the trainer writes it."""
    data = bytearray(heartbeat.SIZE)
    for number, mark in enumerate(marks):
        heartbeat.MARK.pack_into(data, heartbeat.MARKS_AT + number * 8, mark)
    folder.mkdir(exist_ok=True)
    Path(heartbeat.path(str(folder), rank)).write_bytes(data)


def node(plan: dict[str, Any], me: int, monkeypatch: pytest.MonkeyPatch, text: str = "") -> StartTimings:
    monkeypatch.setenv(node_start.STARTED, text)
    monkeypatch.setattr("dray.runner.control.LOADED", time.clock_gettime(time.CLOCK_BOOTTIME))
    return StartTimings(decoded(plan, me))


class TestOfANode:
    """The runner's own part."""

    def test_the_last_rank_to_import_counts(self, plan, monkeypatch, tmp_path: Path) -> None:
        plan["recipe"]["train"] = {"steps": 1}
        one = node(plan, 1, monkeypatch)
        one.lap(node_start.RENDEZVOUS)
        one.launched()
        rendezvous = one.parts[node_start.RENDEZVOUS]
        assert one.look() == {"rendezvous": rendezvous}
        since = int(one._launched * SECOND)
        beat(tmp_path / "own", 2, since + 3 * SECOND, SECOND // 2, SECOND, 0, 4 * SECOND, 2 * SECOND)
        assert one.look() == {}  # two seconds have not passed
        one._looks_at = 0
        assert one.look() == {}  # rank 3 still imports
        beat(tmp_path / "own", 3, since + 5 * SECOND, SECOND // 4, SECOND // 8)
        one._looks_at = 0
        parts = {"rendezvous": rendezvous, "import": 5.0, "process_groups": 0.25, "model": 0.125}
        assert one.look() == parts
        beat(tmp_path / "own", 3, since + 5 * SECOND, SECOND // 4, SECOND // 8, 0, 3 * SECOND, 2 * SECOND)
        assert one.look(last=True) == {**parts, "compile": 3.0, "first_step": 2.0}
        assert one.look(last=True) == {}

    def test_what_no_trainer_writes(self, plan, monkeypatch, tmp_path: Path) -> None:
        """Marks before the launch, and negative ones."""
        plan["recipe"]["train"] = {"steps": 1}
        one = node(plan, 0, monkeypatch)
        one.launched()
        beat(tmp_path / "own", 0, 1, -5, 1 << 62, SECOND, 0, -1)
        beat(tmp_path / "own", 1, 1, -5, 1 << 62, SECOND, 0, -1)
        assert one.look() == {}
        assert json.loads((tmp_path / "startup.json").read_text())["nodes"] == [{"checkpoint": 1.0}, {}]

    def test_a_program_of_the_user_s_own_tells_no_more(self, plan, monkeypatch) -> None:
        one = node(plan, 1, monkeypatch, f"boot={BOOT} began=1.00")
        one.launched()
        assert ([*one.look()], one.look(last=True)) == (["container"], {})

    @pytest.mark.parametrize("restart", [0, 1])
    def test_a_restart_is_no_part_of_it(self, plan, tmp_path: Path, restart: int) -> None:
        links = control(plan, {}, Loop())
        links.start = Restart(restart)
        links._timings.lap(node_start.RENDEZVOUS)
        links.close()
        assert (tmp_path / "startup.json").exists() is not bool(restart)

    def test_the_first_one_writes_what_all_tell(self, plan, monkeypatch, tmp_path: Path) -> None:
        first = node(plan, 0, monkeypatch)
        first.nodes[1] = {"container": 1.5}
        first.look()
        assert (tmp_path / "startup.json").read_text() == ('{"attempt": 1, "nodes": [{}, {"container": 1.5}]}')

    def test_a_disk_that_is_full_ends_nothing(self, plan, monkeypatch, tmp_path: Path, capsys) -> None:
        (tmp_path / "none").touch()
        plan["folder"] += "/none"
        first = node(plan, 0, monkeypatch)
        first.nodes[1] = {"container": 1.0}
        first.look()
        assert "none/startup.json cannot be written: " in capsys.readouterr().out


@pytest.mark.torch
def test_what_the_trainer_writes_the_runner_reads(plan, monkeypatch, tmp_path: Path) -> None:
    """A part that is taken up again goes on; no step after the first one is part of it."""
    pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    from dray.train.runtime import heartbeat as trainer

    plan["recipe"]["train"], plan["world"]["ranks_per_node"] = {"steps": 1}, 1
    one = node(plan, 0, monkeypatch)
    one.launched()
    beat(tmp_path / "own", 0)
    imported = int((one._launched + 5) * SECOND)
    at = iter([0, *(imported + seconds * SECOND for seconds in (1, 3, 4, 7, 15, 99))])
    monkeypatch.setattr(trainer, "boottime", lambda: next(at))
    monkeypatch.setattr(trainer, "_worker_server", lambda _: None)
    monkeypatch.setenv(heartbeat.VARIABLE, heartbeat.path(str(tmp_path / "own"), 0))
    rank = trainer.Heartbeat()
    rank.begin(None, imported)
    for part in (heartbeat.GROUPS, heartbeat.MODEL, heartbeat.LOAD, heartbeat.MODEL):
        rank.lap(part)
    rank.first_step(6 * SECOND)
    rank.first_step(0)
    assert one._of_ranks() == {
        "import": pytest.approx(5), "process_groups": 1.0, "model": 5.0, "checkpoint": 1.0, "compile": 6.0,
        "first_step": 2.0,
    }  # fmt: skip


RANK = """
import os, struct, sys, time
folder = os.environ["DRAY_HEARTBEATS"]
node = int(sys.argv[1])
for rank in (2 * node, 2 * node + 1):
    at = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with open(f"{folder}/beat-{rank}", "wb") as file:
        file.write(struct.pack("<16q", *[0] * 8, at, 10**9, 2 * 10**9, 0, 0, (3 + node) * 10**9, 0, 0))
"""


@pytest.mark.seconds
def test_two_nodes(plan, start: Start, tmp_path: Path) -> None:
    """Through the runners' own connections; the ranks end at once, and what they told last is not lost."""
    plan["recipe"]["train"] = {"steps": 1}
    plan["launcher"], plan["command"] = [sys.executable, "-c", RANK, "{node_rank}"], ["true"]
    before = {node_start.STARTED: f"boot={BOOT} began=0.01"}
    nodes = [start(number, 2, f"node{number + 1}", **before) for number in (0, 1)]
    assert [ended(one)[0] for one in nodes] == [0, 0]
    found = json.loads((tmp_path / "startup.json").read_text())
    assert found["attempt"] == 1
    for number, row in enumerate(found["nodes"]):
        assert [*row] == ["container", "rendezvous", "import", "process_groups", "model", "first_step"]
        assert [row[name] for name in ("process_groups", "model", "first_step")] == [1.0, 2.0, 3.0 + number]
        assert row["container"] > row["rendezvous"] >= 0  # since the machine has started
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("startup")] == ["startup.json"]


def attempt(folder: Path, nodes: object, number: int = 1) -> RunPaths:
    paths = RunPaths(folder / "r", number)
    paths.create(new=number == 1)
    paths.startup.write_text(json.dumps({"attempt": number, "nodes": nodes}))
    return paths


A = {"stage": 4.0, "container": 1.0, "rendezvous": 9.0, "import": 5.0, "first_step": 2.0}
B = {"stage": 12.0, "container": 0.5, "rendezvous": 1.5, "import": 6.5, "first_step": 2.0, "tflops": 612.0}


class TestOfARun:
    """What the host makes of it."""

    def test_each_node_and_the_whole(self, tmp_path: Path) -> None:
        found = metrics.read_startup(attempt(tmp_path, [A, B]), ["n1", "n2"], 60.0)
        assert found is not None
        assert found.parts == {"queue": 60.0, **A}
        assert found.nodes == {"n1": A, "n2": {part: seconds for part, seconds in B.items() if part != "tflops"}}
        assert found.tflops == metrics.Slowest(node="n2", s=612.0)
        assert metrics.startup_text(found) == (
            "start-up: queue 60.0 s, image staged 4.0 s, container 1.0 s, rendezvous 9.0 s, "
            "launcher and imports 5.0 s, first step 2.0 s"
        )

    @pytest.mark.parametrize(
        "text",
        [
            '{"attempt": 1, "nodes": {}}',
            '{"attempt": 1, "nodes": null}',
            '{"attempt": 1, "nodes": [[], 1, null]}',
            '{"attempt": 1, "nodes": [{"stage": -1}]}',
            '{"attempt": 1, "nodes": [null, null, {"stage": 1}]}',
        ],
    )  # fmt: skip
    def test_a_file_that_is_damaged(self, text: str, tmp_path: Path) -> None:
        paths = attempt(tmp_path, [])
        paths.startup.write_text(text)
        assert metrics.read_startup(paths, ["n1", "n2"]) is None

    def test_the_first_node_is_not_told(self, tmp_path: Path) -> None:
        found = metrics.read_startup(attempt(tmp_path, [None, B]), ["n1", "n2"])
        assert found is not None
        assert (found.parts, [*found.nodes]) == ({}, ["n2"])


def test_what_dray_status_and_dray_runs_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = metrics.read_startup(attempt(tmp_path, [A, None]), ["n1", "n2"], 60.0)
    seen = State(run="r", folder="/r", state="running", startup=found)
    assert runs.status_text(seen) == [
        "r: running",
        "  start-up: queue 60.0 s, image staged 4.0 s, container 1.0 s, rendezvous 9.0 s, launcher and imports 5.0 s, "
        "first step 2.0 s",
        "run folder: /r",
    ]
    spent = Spent(node_hours=3, gpu_hours=12.34, unknown=[1])
    ended = State(run="r", folder="/r", state="lost", spent=spent)
    assert runs.status_text(ended)[1:-1] == ["  cost: >12.34 GPU-h"]
    runs.print_table([ended])
    assert capsys.readouterr().out == (
        "RUN  STATE  RECIPE  NODES  STEP  LOSS  STARTED  ATTEMPTS          COST\n"
        "r    lost                                              0  >12.34 GPU-h\n"
    )
