"""Whole trainings of a tiny model, as processes: right on any number of ranks, and resumed to the last bit."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.runs import local, write  # noqa: E402

pytestmark = pytest.mark.torch

TINY = (
    "model.config.n_layer=2", "model.config.n_embd=32", "model.config.n_head=2", "data.block=32",
    "model.config.n_positions=32", "train.log_every=1", "train.warmup_steps=2", "train.lr=1e-2",
    "launcher=python", "batch.global_size=8", "nodes=1",
)  # fmt: skip


class Run:
    """A run of one node on this machine, that can be begun, watched and killed."""

    def __init__(self, root: Path, folder: Path, ranks: int, *words: str, per_device: int | None = None) -> None:
        self.folder = folder
        said = [*TINY, f"ranks_per_node={ranks}", f"batch.per_device={per_device or 8 // ranks}", *words]
        recipe = write.read_recipe(root / "recipes" / "smoke-cpu.toml", [*said, f"data.cache={folder.parent}/tokens"])
        facts = local.facts(recipe, engine="bare", image=sys.executable, nodes=1, gpus_per_node=0, site="")
        plan = write.write(recipe, facts, runs=folder.parent, name=folder.name)
        self.env = {**os.environ, "DRAY_CPUS": str(os.cpu_count()), "OMP_NUM_THREADS": "1"}
        self.env |= {"DRAY_NODE": "0", "DRAY_NODES": "1"}
        self.env["DRAY_NODE_NAME"] = plan.world.nodes[0].name

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", self.folder / "node.sh"], env=self.env, start_new_session=True)

    def end(self) -> Run:
        with self.start() as process:
            assert process.wait(240) == 0, "".join(path.read_text() for path in self.folder.glob("logs/rank-*.log"))
        return self

    def events(self, kind: str) -> list[dict]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == kind]

    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step")]

    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "checkpoints/final/model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Run:
    root = Path(__file__).parents[2]
    return Run(root, tmp_path_factory.mktemp("my runs") / "alone", 1, "train.steps=20").end()


def reference(root: Path, run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, float32, no library of ours but the order of the tokens."""
    from dray.train import data, model
    from dray.train.config import read
    from dray.train.order import Order

    config = read(str(run.folder / "plan.json"))
    tokens = data.tokenizer()
    training, _ = data.splits(config, tokens, print)
    torch.manual_seed(config.seed)
    network = model.build(config, tokens)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.0, weight_decay=config.weight_decay)
    order = Order(len(training.ids), config.block, config.seed)
    losses = []
    for step in range(config.steps):
        after = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
        scale = step / config.warmup_steps if after < 0 else 0.5 * (1 + math.cos(math.pi * after))
        rows = torch.stack([torch.tensor(training.block(order.start(step * 8 + n), config.block)) for n in range(8)])
        loss = network(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * scale
        optimizer.step()
        losses.append(loss.item())
    return losses, network.state_dict()


def test_it_is_what_a_plain_loop_makes(root: Path, alone: Run) -> None:
    losses, weights = reference(root, alone)
    assert alone.losses() == pytest.approx(losses, rel=1e-5)
    for name, saved in alone.weights().items():
        torch.testing.assert_close(saved, weights[name], rtol=1e-3, atol=1e-4)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("ranks", "per_device", "strategy"), [(2, 4, "ddp"), (4, 2, "ddp"), (1, 2, "ddp"), (2, 2, "fsdp"), (4, 2, "fsdp")]
)
def test_ranks_and_passes_change_nothing(
    root: Path, tmp_path: Path, alone: Run, ranks: int, per_device: int, strategy: str
) -> None:
    run = Run(
        root, tmp_path / "run", ranks, "train.steps=20", f"train.strategy={strategy}", per_device=per_device
    ).end()
    assert run.losses() == pytest.approx(alone.losses(), rel=2e-5)
    assert run.events("eval")[0]["loss"] == pytest.approx(alone.events("eval")[0]["loss"], rel=2e-5)


@pytest.mark.parametrize(
    ("strategy", "offload"), [("zero1", ""), ("zero2", ""), ("zero3", ""), ("zero2", "optimizer"), ("zero3", "all")]
)
def test_deepspeeds_stages_are_the_same_training(
    root: Path, tmp_path: Path, alone: Run, strategy: str, offload: str
) -> None:
    pytest.importorskip("deepspeed")
    words = ("train.steps=20", f"train.strategy={strategy}", f"train.offload={offload}", "batch.per_device=2")
    run = Run(root, tmp_path / "run", 2, *words, per_device=2).end()
    assert run.losses() == pytest.approx(alone.losses(), rel=2e-5)
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, alone.weights()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_a_resumed_run_is_the_same_to_the_last_bit(root: Path, tmp_path: Path, strategy: str) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    words = ("train.steps=12", f"train.strategy={strategy}", "checkpoint.every=[[0, 6]]", "checkpoint.keep=9")
    words += ("model.config.resid_pdrop=0.1",)
    whole = Run(root, tmp_path / "whole", 2, *words).end()
    again = Run(root, tmp_path / "again", 2, *words)
    shutil.copytree(whole.folder / "checkpoints/step-6", again.folder / "checkpoints/step-6")
    again.end()
    assert again.events("start")[0]["first_step"] == 6
    assert again.losses() == whole.losses()[6:]
    assert all(torch.equal(weight, whole.weights()[name]) for name, weight in again.weights().items())


def test_another_number_of_ranks_goes_on_from_the_same_place(root: Path, tmp_path: Path, alone: Run) -> None:
    first = Run(root, tmp_path / "first", 4, "train.steps=20", "checkpoint.every=[[0, 8]]", "checkpoint.keep=9").end()
    again = Run(root, tmp_path / "again", 2, "train.steps=20", "train.strategy=fsdp")
    shutil.copytree(first.folder / "checkpoints/step-8", again.folder / "checkpoints/step-8")
    again.end()
    assert again.losses() == pytest.approx(alone.losses()[8:], rel=2e-5)


@pytest.mark.parametrize("harm", ["flip", "cut", "lose", "manifest"])
def test_a_broken_checkpoint_is_said_and_the_one_before_is_taken(root: Path, tmp_path: Path, harm: str) -> None:
    words = ("train.steps=6", "checkpoint.every=[[0, 2]]", "checkpoint.keep=9")
    first = Run(root, tmp_path / "first", 2, *words).end()
    again = Run(root, tmp_path / "again", 2, *words)
    for step in (2, 4):
        shutil.copytree(first.folder / f"checkpoints/step-{step}", again.folder / f"checkpoints/step-{step}")
    newest = again.folder / "checkpoints/step-4"
    file = sorted(newest.glob("*.distcp"))[0]
    if harm == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif harm == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        (file if harm == "lose" else newest / "manifest.json").unlink()
    again.end()
    assert again.events("start")[0]["first_step"] == 2
    assert f"checkpoint {newest} is left out: " in (again.folder / "logs/rank-0.log").read_text()
    assert again.losses() == first.losses()[2:]


def test_killed_at_any_moment_it_goes_on_from_the_newest_whole_one(root: Path, tmp_path: Path) -> None:
    """A checkpoint after each step, and SIGKILL to all at random moments: what is found is always whole."""
    run = Run(root, tmp_path / "run", 2, "train.steps=100000", "checkpoint.every=[[0, 1]]", "checkpoint.keep=2")
    moments = random.Random(1)
    reached = [0]
    for _ in range(5):
        process = run.start()
        metrics = run.folder / "metrics.jsonl"
        before = metrics.read_text().count("\n") if metrics.exists() else 0
        while not metrics.exists() or metrics.read_text().count("\n") < before + 4:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moments.random())
        os.killpg(process.pid, signal.SIGKILL)
        subprocess.run(["pkill", "-KILL", "-f", f"dray.train {run.folder}/plan.json"], check=False)
        process.wait()
        starts = [event["first_step"] for event in run.events("start")]
        assert starts[-1] >= reached[-1]
        reached.append(starts[-1])
    assert reached[-1] > 0
    assert "is left out" not in (run.folder / "logs/rank-0.log").read_text()
