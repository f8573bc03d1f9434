"""The whole way on a real Slurm with real Apptainer: what a job leaves, and what its options change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

SHORT = ("ranks_per_node=1", "train.steps=4", "train.warmup_steps=0", "train.log_every=1", "preflight.when=never")


def test_the_smoke_recipe_trains_on_two_nodes(full_run) -> None:
    assert full_run.code == 0, full_run.output
    (start,) = full_run.metrics("start")
    assert (start["world_size"], start["hosts"]) == (4, ["n1", "n1", "n2", "n2"])
    steps = full_run.metrics("step")
    assert [step["step"] for step in steps] == [1, *range(10, 61, 10)]
    assert steps[0]["loss"] > 5.4  # a model that knows nothing: ln(257) is 5.55
    assert steps[-1]["loss"] < 2
    result = full_run.result()
    assert (result["status"], result["exit_code"], result["cause"]) == ("done", 0, None)
    assert (result["world_size"], result["hosts"], result["steps"]) == (4, ["n1", "n2"], 60)
    assert result["perplexity"] < 7


def test_the_run_folder_is_complete(full_run) -> None:
    found = {str(path.relative_to(full_run.folder)) for path in full_run.folder.rglob("*") if path.is_file()}
    (board,) = [path for path in found if path.startswith("trackers/tensorboard/events.out.tfevents.")]
    assert {path for path in found if not path.startswith("checkpoints/")} == {
        board,
        "summary.json",
        *(
            f"attempt-1/{name}"
            for name in (
                "capsule.json",
                "facts.txt",
                "metrics.jsonl",
                "node.sh",
                "plan.json",
                "preflight/report.json",
                "rendezvous.json",
                "result.json",
                "secret",
                "startup.json",
                "stop",
                "logs/srun.log",
                *(f"logs/node-{node}.log" for node in range(2)),
                *(f"logs/rank-{rank}.log" for rank in range(4)),
                *(f"nodes/node-{node}.json" for node in range(2)),
            )
        ),
    }
    assert {"checkpoints/final/config.json", "checkpoints/final/model.safetensors"} <= found


def test_rank_0_is_seen_in_the_jobs_own_output(full_run) -> None:
    assert "\nstep 60/60  loss 1." in full_run.output
    assert full_run.output.splitlines()[-1] == f"run folder: /shared/runs/{full_run.folder.name}"


@pytest.mark.slow
def test_one_node_by_sbatchs_option_learns_the_same(sbatch, full_run) -> None:
    alone = sbatch("--nodes=1", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT)
    assert alone.code == 0, alone.output
    (start,) = alone.metrics("start")
    assert (start["world_size"], start["hosts"]) == (1, ["n1"])
    # A quarter of the ranks, four times the accumulation, the same samples: the same first loss.
    first, first_of_two = (run.metrics("step")[0]["loss"] for run in (alone, full_run))
    assert first == pytest.approx(first_of_two, abs=1e-4)


@pytest.mark.slow
def test_a_checkout_with_a_space_in_its_path_submitted_from_elsewhere(sbatch, cluster, root: Path, sif: Path) -> None:
    checkout = cluster.shared / "my work"
    shutil.rmtree(checkout, ignore_errors=True)
    for folder in ("slurm", "recipes", "containers/steps"):
        shutil.copytree(root / folder, checkout / folder)
    (checkout / "build").mkdir()
    os.link(sif, checkout / "build" / sif.name)
    script = "/shared/my work/slurm/multinode.sh"
    words = ("--gpus-per-node=1", script, "recipes/smoke-cpu.toml", *SHORT)
    refused = sbatch(*words, workdir="/tmp")
    assert refused.code == 78, refused.output
    assert "dray: the job has GPUs, and the cpu image cannot use them\n" in refused.output
    ended = sbatch(*words, "gpus=none", "ranks_per_node=1", workdir="/tmp")
    assert ended.code == 0, ended.output
    assert ended.metrics("start")[0]["hosts"] == ["n1", "n2"]
    assert '"image": "/shared/my work/build/dray-cpu.sif"' in (ended.attempt / "plan.json").read_text()
    shutil.rmtree(checkout)


@pytest.mark.slow
def test_runs_go_beside_the_submission_when_nothing_else_is_said(sbatch, cluster, root: Path) -> None:
    ended = sbatch(
        "--export=ALL,DRAY_RUNS=", f"{root}/slurm/singlenode.sh", "recipes/smoke-cpu.toml", *SHORT,
        workdir="/shared/home",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    assert ended.folder.parent == cluster.shared / "home" / "runs"
    assert ended.result()["hosts"] == ["n1"]


def test_the_saved_model_loads_and_writes(full_run) -> None:
    assert full_run.result()["sample"].startswith("two: the guard ")
