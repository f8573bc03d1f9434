"""`dray submit` of a command to the real Slurm; test_recipes.py submits recipes."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.cluster


def test_a_submitted_command_is_every_rank(submit) -> None:
    asks = "from accelerate import Accelerator; print('of', Accelerator().num_processes)"
    words = [
        "launcher=accelerate",
        "nodes=2",
        "ranks_per_node=1",
        "preflight.when=never",
        "--",
        "python3",
        "-c",
        asks,
    ]
    ended, _ = submit(*words)
    folder = ended.attempt
    logs = {path.name: path.read_text() for path in (folder / "logs").glob("rank-*.log")}
    assert logs == {f"rank-{rank}.log": "of 2\n" for rank in range(2)}
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
