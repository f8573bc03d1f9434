"""Runners as the nodes of a plan on this machine: what tests of the launch, the rendezvous and the store share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dray.runner.children import Loop
from dray.runner.connections import Connection
from dray.runner.control import Control, StartTimings
from dray.runner.plan import Plan, of
from helpers import PYTHON

SECRET = "5ec2e7" * 8
# In place of torch, for the first node's store.
TORCHLESS = str(Path(__file__).with_name("torchless"))


def rendezvous(plan: dict[str, Any]) -> tuple[str, int]:
    """Where the first node listens, once it has told the others."""
    file = Path(plan["folder"], "rendezvous.json")
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = json.loads(file.read_text())
    return told["address"], told["port"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def planned(folder: Path, **world: object) -> dict[str, Any]:
    """A plan for two nodes on loopback, whose launcher writes down what it was given; with these keys of its world."""
    return {
        "folder": str(folder),
        "scratch": str(folder / "own"),
        "run": "r1",
        "attempt": 1,
        "variant": "cpu",
        "launcher": [sys.executable, "-c", "import sys; print(sys.argv[1:])", "--node-rank", "{node_rank}"],
        "command": ["true", "{node_rank}"],
        "where": str(folder),
        "preflight": None,
        "env": [],
        "pass_env": [],
        "recipe": {"train": None, "hang_timeout_s": None, "pass_env": []},
        "world": {
            "nodes": loopback("node1", "node2"),
            "ranks_per_node": 2,
            "size": 4,
            "master": "127.0.0.1",
            "port": 0,
            "interfaces": [],
            "rendezvous_timeout_s": 60,
            "max_restarts": 0,
            "cores": [],
            "one_machine": True,
            "shared_folder": True,
            "identity": {
                "node": "DRAY_NODE",
                "nodes": "DRAY_NODES",
                "name": "DRAY_NODE_NAME",
                "cpus": "DRAY_CPUS",
                "image": "DRAY_IMAGE_ID",
            },
            **world,
        },
    }


def loopback(*names: str) -> list[dict[str, str]]:
    """Nodes of a plan, all on loopback."""
    return [{"name": name, "address": "127.0.0.1"} for name in names]


def decoded(plan: dict[str, Any], me: int = 0) -> Plan:
    """The plan as this node's runner reads it."""
    return of(plan)._replace(me=me)


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    """A plan for two nodes on loopback, with its secret."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    return planned(tmp_path)


def control(plan: dict[str, Any], connections: dict[int, Connection], loop: Loop) -> Control:
    """The first node's, without ranks."""
    loop.end = loop.ask = loop.tell = lambda *_: None  # type: ignore[attr-defined]
    first = decoded(plan)
    return Control(first, loop, connections, StartTimings(first))  # type: ignore[arg-type]


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(plan: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest):
    """Start the runner as one node; for tests that are not marked `torch`, with a store that nobody can ask."""
    started = []
    torchless = "" if request.node.get_closest_marker("torch") else TORCHLESS

    def begin(
        node: object = "0", nodes: object = "2", name: str | None = "node1", path: Path | None = None,
        start_new_session: bool = False, **more: str,
    ):  # fmt: skip
        file = path or tmp_path / "plan.json"
        if path is None:
            file.write_text(json.dumps(plan))
        identity = {"DRAY_NODE": node, "DRAY_NODES": nodes, "DRAY_NODE_NAME": name}
        env = {key: str(value) for key, value in identity.items() if value is not None}
        if path := [*filter(None, (more.get("PYTHONPATH"), torchless))]:
            more["PYTHONPATH"] = os.pathsep.join(path)
        process = subprocess.Popen(
            [sys.executable, "-m", "dray.runner", file],
            env={**PYTHON, "DRAY_CPUS": "1", **env, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=start_new_session,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


# What a node says that was given one core for its two ranks.
UNBOUND = "dray: cores of each rank: not bound (1 for 2 ranks: ask for more with --cpus-per-task); OMP_NUM_THREADS=1"


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err
