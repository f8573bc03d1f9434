"""How long each part of a start took, of a real Slurm and a real image on two nodes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster
# With this recipe's preflight; nothing is staged, compiled or resumed.
PARTS = ["container", "rendezvous", "preflight", "import", "process_groups", "model", "checkpoint", "first_step"]


@pytest.mark.slow
def test_each_part_of_both_nodes(sbatch) -> None:
    given = ["train.steps=2", "train.warmup_steps=1"]
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *given)
    assert ended.code == 0, ended.output
    result, (_, second) = ended.result(), ended.metrics("step")
    found = result["startup"]
    # Both nodes have the first one's clock here: they are containers of one kernel. Else n2 would know of neither.
    both = ["plan", "srun", *PARTS]
    assert {name: [*parts] for name, parts in found["nodes"].items()} == {"n1": both, "n2": both}
    assert [*found["parts"]] == ["queue", "plan", "srun", *PARTS]
    # From the beginning of the job's script to the second step; the plan is written at the end of the planning.
    whole = second["time"] - (ended.attempt / "plan.json").stat().st_mtime + found["parts"]["plan"]
    for parts in (found["parts"], *found["nodes"].values()):
        assert 0 < sum(seconds for part, seconds in parts.items() if part != "queue") <= whole
    assert found["parts"]["queue"] >= 0
    told = json.loads((ended.attempt / "startup.json").read_text())
    assert told["nodes"] == [*found["nodes"].values()]
    cost = result["cost"]
    assert (cost["nodes"], cost["gpus"]) == (2, 0)
    assert result["spent"]["node_hours"] == pytest.approx(2 * cost["seconds"] / 3600, abs=1e-4)
    argv = [sys.executable, "-m", "dray", "status", str(ended.folder)]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    heads = [line.strip().partition(":")[0] for line in shown if line.startswith("  start-up")]
    assert heads == ["start-up"]
    assert any(line.startswith("  cost: ") for line in shown)
