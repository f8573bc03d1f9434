"""`dray submit` to the real Slurm: the run folder is there before the job is, and the job fills it."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.cluster

SHORT = ("train.steps=4", "train.warmup_steps=0", "preflight.when=never")


def test_a_submitted_recipe_trains_in_its_folder(submit) -> None:
    words = ["--nodes", "2", "--sbatch=--export=NONE", *SHORT]
    ended, job = submit("recipes/smoke-cpu.toml", *words)
    folder = ended.folder
    result = json.loads((folder / "result.json").read_text())
    assert (result["run"], result["status"], result["hosts"]) == (folder.name, "done", ["n1", "n2"])
    assert f"run folder: {folder}\n" in (folder / f"job-{job}.log").read_text()
    assert json.loads((folder / "plan.json").read_text())["run"] == folder.name


def test_a_submitted_command_is_every_rank(submit) -> None:
    asks = "from accelerate import Accelerator; print('of', Accelerator().num_processes)"
    words = [
        "--launcher",
        "accelerate",
        "nodes=2",
        "ranks_per_node=2",
        "preflight.when=never",
        "--",
        "python3",
        "-c",
        asks,
    ]
    ended, _ = submit(*words)
    folder = ended.folder
    logs = {path.name: path.read_text() for path in (folder / "logs").glob("rank-*.log")}
    assert logs == {f"rank-{rank}.log": "of 4\n" for rank in range(4)}
    assert json.loads((folder / "result.json").read_text())["status"] == "done"
