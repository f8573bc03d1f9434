"""The trainer on the real cluster: every strategy is the same training, whatever starts it, and a requeued job goes on."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.cluster

SHORT = (
    "train.steps=6", "train.warmup_steps=2", "train.log_every=1", "preflight.when=never", "model.config.n_layer=2",
    "data.validation_samples=8",
)  # fmt: skip


def losses(ended) -> list[float]:
    assert ended.code == 0, ended.output
    assert ended.metrics("start")[0]["hosts"] == ["n1", "n1", "n2", "n2"]
    return [step["loss"] for step in ended.metrics("step")] + [ended.metrics("eval")[0]["loss"]]


@pytest.fixture(scope="module")
def plain(sbatch) -> list[float]:
    """DDP; tests/unit/test_train_runs.py holds it against a loop of forty lines."""
    return losses(sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT))


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("accelerate", ("train.strategy=fsdp",)),
        ("deepspeed", ("train.strategy=zero1",)),
        ("torchrun", ("train.strategy=zero2",)),
        ("accelerate", ("train.deepspeed=deepspeed/zero3.json",)),
        ("deepspeed", ("train.deepspeed=deepspeed/zero3-offload.json",)),
    ],
)
def test_every_strategy_is_the_same_training(sbatch, plain: list[float], launcher: str, words: tuple[str, ...]) -> None:
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", f"launcher={launcher}", *SHORT, *words)
    assert losses(ended) == pytest.approx(plain, rel=2e-5)


def test_a_run_that_was_cut_off_goes_on_in_the_same_folder(sbatch, plain: list[float], root) -> None:
    """As a requeued job does: the same command, the same run folder, and the step that the last checkpoint is of."""
    words = ("slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT, "checkpoint.every=[[0, 2]]")
    first = sbatch(*words)
    assert losses(first)[:6] == pytest.approx(plain[:6], rel=1e-6)
    assert first.folder
    whole = sorted(path.name for path in (first.folder / "checkpoints").iterdir())
    assert whole == ["final", "step-4", "step-6"]
    manifest = json.loads((first.folder / "checkpoints/step-4/manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"], manifest["run"]) == (4, 4, first.folder.name)
    assert len(manifest["image_sha256"]) == 64
