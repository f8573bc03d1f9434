"""The trainer on the real cluster: the same training there (tests/unit has every strategy), and jobs that resume."""

from __future__ import annotations

import json
import shutil

import pytest

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        pytest.param("accelerate", ("train.strategy=fsdp",), marks=pytest.mark.slow),
        pytest.param("torchrun", ("train.strategy=zero2", "model.pad_to_multiple_of=128"), marks=pytest.mark.slow),
        pytest.param(
            "deepspeed",
            ("train.deepspeed=deepspeed/zero3-offload.json", "model.pad_to_multiple_of=128"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_strategy_is_the_same_training(sbatch, plain, losses_of, short, launcher: str, words) -> None:
    """A rank on each node: what they shard goes over the network."""
    options = (f"launcher={launcher}", "ranks_per_node=1", *short, *words)
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *options)
    assert losses_of(ended, ranks=2) == pytest.approx(plain, rel=2e-5)


@pytest.mark.slow
def test_the_same_command_goes_on_where_it_was_cut_off(sbatch, plain, short, cluster) -> None:
    """From the newest checkpoint that is whole, in a run folder of its own, by other ranks of another strategy."""
    kept = cluster.shared / "home" / "my checkpoints"
    shutil.rmtree(kept, ignore_errors=True)
    words = (*short, "checkpoint.every=[[0, 2]]", "checkpoint.folder=/shared/home/my checkpoints")
    first = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *words, "train.steps=5")
    assert first.code == 0, first.output
    assert sorted(path.name for path in kept.iterdir()) == ["step-2", "step-4"]
    manifest = json.loads((kept / "step-4" / "manifest.json").read_text())
    assert first.folder
    assert (manifest["step"], manifest["world_size"], manifest["run"]) == (4, 4, first.folder.name)
    assert len(manifest["image_sha256"]) == 64
    second = sbatch("--nodes=1", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *words, "train.strategy=fsdp")
    assert second.code == 0, second.output
    (start,) = second.metrics("start")
    assert (start["first_step"], start["world_size"]) == (4, 2)
    assert [step["loss"] for step in second.metrics("step")] == pytest.approx(plain[4:6], rel=2e-5)
