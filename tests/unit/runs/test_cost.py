"""What attempts cost: nodes and GPUs, and never more than is known."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest

from dray.facts import Facts
from dray.runs import metrics
from dray.runs.finish import finish
from dray.runs.metrics import Cost, Spent
from dray.runs.prepare import read_recipe, write
from dray.runs.result import history, read
from helpers import ROOT

TOLD = """first_of_job=1
begun_s=100.50 ended_s=3700.50 allocated_nodes=2 allocated_gpus=4
"""


def test_of_the_whole_job() -> None:
    assert metrics.cost_of_job(TOLD) == Cost(seconds=3600.0, nodes=2, gpus=8)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "begun_s= ended_s=3700.50 allocated_nodes=2 allocated_gpus=4",  # without /proc
        "begun_s=3700.50 ended_s=100.50 allocated_nodes=2",
        "begun_s=1.2.3 ended_s=3700.50 allocated_nodes=2",
        "begun_s=1 ended_s=2 allocated_nodes=0",
        "begun_s=1 ended_s=2 allocated_nodes=1.5",
        "begun_s=1 ended_s=2s allocated_nodes=2",
    ],
)
def test_what_is_not_known(line: str) -> None:
    assert metrics.cost_of_job(line) is None


def test_all_attempts() -> None:
    one, other = Cost(seconds=3600, nodes=2, gpus=8), Cost(seconds=1800, nodes=2, gpus=8)
    assert metrics.sum_costs([(1, one), (2, other)]) == Spent(node_hours=3, gpu_hours=12)
    assert metrics.sum_costs([(1, None), (2, other), (3, one)]) == Spent(node_hours=3, gpu_hours=12, unknown=[1])
    assert metrics.sum_costs([(1, None)]) is None
    assert metrics.sum_costs([(1, Cost(seconds=60, nodes=3))]) == Spent(node_hours=0.05)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, ""),
        (Spent(node_hours=0.123), "0.12 node-h"),
        (Spent(node_hours=3, gpu_hours=12.34), "12.34 GPU-h"),
        (Spent(node_hours=3, gpu_hours=5e4, unknown=[1]), ">50,000.00 GPU-h"),
    ],
)  # fmt: skip
def test_in_words(found: Spent | None, text: str) -> None:
    assert metrics.cost_text(found) == text


JOB = "JobId=17 BatchFlag=1 SubmitTime=2026-11-25T10:00:00 EligibleTime=x StartTime=2026-11-25T10:02:05 EndTime=Unknown"


@pytest.mark.parametrize(
    ("known", "seconds"),
    [
        (f"first_of_job=1\n{JOB}\n", 125.0),
        (f"{JOB}\n", None),  # an earlier attempt has had the wait
        (f"first_of_job=1\n{JOB.replace('BatchFlag=1', 'BatchFlag=0')}\n", None),  # an salloc, which may have waited
        (f"first_of_job=1\n{JOB.replace('T10:02:05', 'T09:00:00')}\n", 0.0),  # Slurm's clock was set
        (f"first_of_job=1\n{JOB.replace('2026-11-25T10:02:05', 'Unknown')}\n", None),
        (f"first_of_job=1\n{JOB.replace('2026-11-25T10:02:05', '2026-13-25T10:02:05')}\n", None),
        ("", None),
    ],
)
def test_the_queue_by_slurm_s_clock(known: str, seconds: float | None) -> None:
    assert metrics.queue_s(known) == seconds


def test_a_result_has_them(tmp_path: Path) -> None:
    """The first attempt was killed; the second is by what a job's script tells, and valid as published."""
    facts = Facts(scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")
    for _ in range(2):
        paths = write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml"), facts, runs=tmp_path, run="mine")[1]
    nodes = [{"plan": 4.0, "srun": 0.5, "import": 9.0}, {"import": 11.0}]
    paths.startup.write_text(json.dumps({"attempt": 2, "nodes": nodes}))
    finish(paths, code=1, batch=True, known=f"{JOB}\n{TOLD}")
    found = json.loads(paths.result.read_text())
    jsonschema.validate(found, json.loads((ROOT / "docs/reference/result.schema.json").read_text()))
    assert found["startup"] == {
        "parts": {"queue": 125.0, "plan": 4.0, "srun": 0.5, "import": 9.0},
        "nodes": {"n1": nodes[0], "n2": nodes[1]},
        "tflops": None,
    }
    assert found["cost"] == {"seconds": 3600.0, "nodes": 2, "gpus": 8}
    assert found["spent"] == {"node_hours": 2.0, "gpu_hours": 8.0, "unknown": [1]}
    third = write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml"), facts, runs=tmp_path, run="mine")[1]
    assert [one.cost and one.cost.gpus for one in history(third)] == [None, 8]
    third.startup.write_text("{")
    assert (finish(third, code=1).startup, read(third.result).cost, finish(third, code=1).warnings) == (None, None, [])


SCRIPT = 'set -euo pipefail\nimage=x attempt=x\nsource "$DRAY_HOME/slurm/job.sh"\n'


@pytest.mark.parametrize("gpus", ["SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"])  # salloc sets the second alone
def test_what_the_job_s_script_tells(gpus: str, tmp_path: Path) -> None:
    """Slurm's own answer as it comes."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho JobId=17 BatchFlag=1\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = SCRIPT + 'lost=() stopped_by="" began_at=12.50\nend::job 0\nlost=(n2)\nend::cost'
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DRAY_HOME": str(ROOT), "SLURM_JOB_ID": "17"}
    env |= {"SLURM_JOB_NUM_NODES": "2", gpus: "a100:4", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    before, first, *figures = done.stdout.splitlines()
    assert (before, first) == ("JobId=17 BatchFlag=1", "first_of_job=1")
    assert [line.split(" ended_s=")[0] + " " + line.split(" ", 2)[2] for line in figures] == [
        "begun_s=12.50 allocated_nodes=2 allocated_gpus=4"
    ] * 2
    assert done.stderr == ""


def test_what_the_script_tells_without_gpus(tmp_path: Path) -> None:
    script = SCRIPT + 'lost=(n2) began_at=1\nend::cost | sed "s/ended_s=[0-9.]*/ended_s=/"'
    env = {"PATH": os.environ["PATH"], "DRAY_HOME": str(ROOT), "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("begun_s=1 ended_s= allocated_nodes=2 allocated_gpus=0\n", "")
