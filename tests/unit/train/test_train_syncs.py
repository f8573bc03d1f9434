"""No step waits for the device: the host is ahead of it, and reads numbers in one place, where a line is written."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import syncs  # noqa: E402
from dray.train.objectives.base import Batch  # noqa: E402
from helpers import ROOT  # noqa: E402
from nodes import free_port  # noqa: E402
from trainings import GPT, config  # noqa: E402

pytestmark = pytest.mark.torch

BERT = (
    "model.type=bert", "train.objective=masked",
    *(f"model.config.{name}={value}" for name, value in (
        ("num_hidden_layers", 2), ("hidden_size", 32), ("num_attention_heads", 2), ("intermediate_size", 64),
        ("max_position_embeddings", 32), ("hidden_dropout_prob", 0.1),
    )),
)  # fmt: skip
LOGGED = (
    "train.steps=4", "train.warmup_steps=1", "train.log_every=3", "train.eval_every=2", "batch.per_device=4",
    "data.max_eval_samples=8",
)  # fmt: skip
RUNS: dict[str, tuple[str, ...]] = {
    "ddp, two micro-batches, checkpoints": ("checkpoint.every=2", "model.config.attn_pdrop=0.1"),
    "fsdp in bf16, documents masked": ("train.strategy=fsdp", "train.precision=bf16", "data.document_mask=true"),
    "attention scores, eager attention": ("train.attention_stats=true", "model.attn_implementation=eager"),
    "masked": BERT,
    # A step is left out, the next one is not.
    "ddp in fp16": ("train.precision=fp16", f"train.initial_loss_scale={2.0**27}"),
    "fsdp with muon in fp16": (
        "train.precision=fp16", f"train.initial_loss_scale={2.0**27}", "train.strategy=fsdp",
        "train.optimizer=muon", "train.ema_decay=0.9",
    ),
}  # fmt: skip
ANALOG = (
    *BERT, "analog.clip_type=gaussian", "analog.clip_sigma=2.5", "analog.forward_inp_res=254",
    "analog.modifier_type=add_gauss", "analog.modifier_std_dev=0.023",
    "analog.input_range_enable=true", "analog.input_range_init_from_data=0",
)  # fmt: skip
if find_spec("aihwkit_lightning"):  # its ranges follow the data first, and it looks whether there is any
    RUNS["analog"] = ANALOG


@pytest.mark.slow
def test_no_step_and_no_evaluation_waits(tmp_path: Path) -> None:
    for number, words in enumerate(RUNS.values()):
        (tmp_path / str(number)).mkdir()
        config(tmp_path / str(number), *LOGGED, *words, model=() if BERT[0] in words else GPT)
    plans = [str(tmp_path / str(number) / "run/attempt-1/plan.json") for number in range(len(RUNS))]
    env = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "DRAY_NODE_NAME": "localhost", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/syncs.py"), *plans],
        env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("nothing waited")] == [
        f"nothing waited: {plan}" for plan in plans
    ]


@pytest.mark.parametrize(
    "waits",
    [
        lambda one: one.item(),
        float,
        lambda one: bool((one > 0).all()),
        lambda one: one[None].tolist(),
        lambda one: one.new_tensor([1, 2]),
        lambda one: torch.tensor(3.0, device=one.device),
        lambda one: one[None][(one > 0)[None]],
        lambda one: one[None].nonzero(),
        lambda one: one.cpu(),
        lambda one: 1 if one.isfinite() else 0,
        lambda one: torch.equal(one, one),
    ],
)
def test_the_guard_sees_what_would_wait(waits) -> None:
    one = torch.tensor(1.0)
    with pytest.raises(syncs.WaitError), syncs.guard():
        waits(one)
    with syncs.guard():
        syncs.may_wait(waits)(one)
        assert torch.full((), 3.0, device=one.device).add(one).clamp(min=1).dim() == 0


def test_a_batch_goes_to_a_device_out_of_pinned_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """meta stands for the GPU, and this machine pins nothing."""
    pinned: list[int] = []
    moved: list[tuple[int, dict]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(copy.data_ptr())
        return copy

    own = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        moved.append((tensor.data_ptr(), kwargs))
        return own(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    rows = torch.zeros(2, 8, dtype=torch.int64)
    there = Batch(rows, rows, rows).to(torch.device("meta"))
    assert {part.device.type for part in (there.input_ids, there.labels, there.position_ids)} == {"meta"}
    assert moved == [(place, {"non_blocking": True}) for place in pinned]
    assert len(moved) == 3
