"""A run that is asked to save and end: who is told, when, and what the nodes end with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dray.contract import run_folder
from dray.runner import rank as rank_module
from helpers import PYTHON, python
from nodes import Start, ended, plan, start

__all__ = ["plan", "start"]

RANK = Path(rank_module.__file__)
RANKS = [sys.executable, "-S", "-E", RANK.with_name("ranks.py")]
# Becomes able to hear it only after a while; then saves, which takes as long, and ends with 75.
SAVES = """
import os, pathlib, signal, sys, time
folder, me, code = pathlib.Path(sys.argv[1]), os.environ.get("RANK", "0"), int(sys.argv[2])
(folder / f"loading-{me}").touch()
while not (folder / "load").exists(): time.sleep(0.01)
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
(folder / f"ready-{me}").touch()
while not heard: time.sleep(0.01)
time.sleep(0.3 * (1 + int(me)))
(folder / f"saved-{me}").write_text(str(len(heard)))
sys.exit(code)
"""


def until(*paths: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path.name for path in paths if not path.exists()]
        time.sleep(0.01)


def nodes_of(plan: dict[str, Any], folder: Path, *, code: int = 75, program: str = SAVES) -> None:
    """Two nodes, each with two ranks under dray's own launcher; all are ready to hear."""
    (folder / run_folder.STOP).touch()
    plan["launcher"] = [
        sys.executable, "-S", "-E", "{ranks}", "2", "2", "{node_rank}", "{master}", "{port}",
    ]  # fmt: skip
    plan["command"] = [sys.executable, "-c", program, str(folder), str(code)]


@pytest.mark.seconds
def test_all_ranks_save_and_the_first_node_says_75(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    nodes_of(plan, tmp_path)
    (tmp_path / "load").touch()
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    until(*(tmp_path / f"ready-{rank}" for rank in range(4)))
    (tmp_path / run_folder.STOP).write_text("USR1\n")
    # srun kills the other nodes with the first that ends badly: that is the last one.
    (second, said) = ended(nodes[1])
    assert second == 0, said
    (first, said) = ended(nodes[0])
    assert first == 75, said
    assert {(tmp_path / f"saved-{rank}").read_text() for rank in range(4)} == {"1"}
    records = [json.loads(path.read_text()) for path in (tmp_path / "failures").iterdir()]
    assert {(record["code"], record["why"]) for record in records} == {(75, "it was asked to save and end")}
    assert (tmp_path / run_folder.SAVED).is_file()


@pytest.mark.seconds
def test_the_first_node_s_ranks_may_end_with_0(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    """As where they had done all before they were asked: the run is not done for that."""
    nodes_of(plan, tmp_path, program=SAVES.replace("exit(code)", "exit(code * (int(me) > 1))"))
    (tmp_path / "load").touch()
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    until(*(tmp_path / f"ready-{rank}" for rank in range(4)))
    (tmp_path / run_folder.STOP).write_text("USR1\n")
    assert [ended(node)[0] for node in nodes] == [75, 0]
    assert (tmp_path / run_folder.SAVED).is_file()


@pytest.mark.seconds
def test_one_that_is_loading_hears_it_later(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    nodes_of(plan, tmp_path)
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    until(*(tmp_path / f"loading-{rank}" for rank in range(4)))
    nodes[1].send_signal(signal.SIGUSR1)  # on any node, for all
    time.sleep(1.5)  # in which it would have died
    (tmp_path / "load").touch()
    assert [ended(node)[0] for node in nodes] == [75, 0]


@pytest.mark.seconds
def test_what_does_not_know_the_signal_goes_on(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    program = "import pathlib, sys, time\nf = pathlib.Path(sys.argv[1])\n(f / 'ready').touch()\n"
    nodes_of(plan, tmp_path, program=f"{program}while not (f / 'on').exists(): time.sleep(0.01)")
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    until(tmp_path / "ready")
    (tmp_path / run_folder.STOP).write_text("USR1\n")
    time.sleep(2.5)
    assert [node.poll() for node in nodes] == [None, None]
    (tmp_path / "on").touch()
    assert [ended(node)[0] for node in nodes] == [0, 0]


@pytest.mark.seconds
def test_another_code_is_a_failure(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    nodes_of(plan, tmp_path, code=3)
    (tmp_path / "load").touch()
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    until(*(tmp_path / f"ready-{rank}" for rank in range(4)))
    (tmp_path / run_folder.STOP).write_text("USR1\n")
    assert [ended(node)[0] for node in nodes] == [3, 3]


@pytest.mark.seconds
def test_75_without_being_asked_is_a_failure_too(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    nodes_of(plan, tmp_path, program="import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(75)\ntime.sleep(60)")
    began = time.monotonic()
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    assert [ended(node)[0] for node in nodes] == [75, 75]
    assert time.monotonic() - began < 30


@pytest.mark.seconds
@pytest.mark.parametrize("inside", ["{}", "sh -c '{}; true'", "sh -c 'sh -c \"{} & wait\"; true'"])
def test_what_a_rank_starts_is_told_once(tmp_path: Path, inside: str) -> None:
    """However deep it is, a process that knows the signal; a shell around it does not."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "load").touch()
    (tmp_path / "saves.py").write_text(SAVES)
    program = inside.format(f"{python()} {tmp_path}/saves.py {tmp_path} 0")
    env = {**PYTHON, "RANK": "1", "WORLD_SIZE": "2"}
    argv = [sys.executable, "-S", "-E", RANK, tmp_path, "2", "node2", "sh", "-c", f"{program}; exit 75"]
    with subprocess.Popen(argv, env=env) as rank:
        until(tmp_path / "ready-1")
        rank.send_signal(signal.SIGUSR1)
        assert rank.wait(20) == 75
    assert (tmp_path / "saved-1").read_text() == "1"
    assert json.loads((tmp_path / "failures" / "rank-1.json").read_text())["why"] == "it was asked to save and end"
