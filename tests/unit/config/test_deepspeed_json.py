"""A DeepSpeed JSON beside a recipe: auto, agreement, and the word about what does not agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.runs.prepare import read_recipe
from helpers import ROOT

GIVEN = {
    "train_batch_size": "auto",
    "gradient_clipping": 0.5,
    "fp16": {"enabled": "auto", "loss_scale_window": 100},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.95], "eps": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
}


def agreed(folder: Path, said: object, *words: str) -> Recipe:
    (folder / "my ds.json").write_text(said if isinstance(said, str) else json.dumps(said, indent=1))
    recipe = (ROOT / "tests" / "tiny.toml").read_text() + 'steps = 20\ndeepspeed = "my ds.json"\n'
    (folder / "r.toml").write_text(recipe)
    return read_recipe(folder / "r.toml", words)


def test_what_the_file_says_becomes_the_recipes_and_auto_is_the_recipes(tmp_path: Path) -> None:
    found = agreed(tmp_path, GIVEN)
    train = found.train
    assert train
    assert (train.strategy, train.offload, train.max_grad_norm, train.betas, train.lr_scheduler_type) == (
        "zero2", "optimizer", 0.5, (0.8, 0.95), "linear",
    )  # fmt: skip
    assert (train.lr, train.precision) == (1e-2, "fp32")
    assert json.loads(train.deepspeed or "") == {
        "fp16": {"loss_scale_window": 100},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }


@pytest.mark.parametrize("name", ["zero2", "zero2-offload", "zero3", "zero3-offload"])
def test_the_files_that_come_with_dray_leave_all_to_the_recipe(name: str) -> None:
    words = [f"train.deepspeed=deepspeed/{name}.json", "train.max_grad_norm=0.25", "train.precision=bf16"]
    train = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words).train
    assert train
    stage, _, offload = name.partition("-")
    wanted = {"": "", "offload": "all" if stage == "zero3" else "optimizer"}[offload]
    assert (train.strategy, train.offload, train.max_grad_norm, train.precision) == (stage, wanted, 0.25, "bf16")
    assert "auto" not in (train.deepspeed or "")


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (
            {"train_batch_size": 16},
            (),
            'batch.global_size and train_batch_size do not agree\n  where:  the recipe and {path}\n'
            "  wanted: batch.global_size = 8, as the recipe says\n"
            "  found:  train_batch_size = 16, in my ds.json\n"
            '  fix:    write "train_batch_size": "auto" in my ds.json, or make them the same',
        ),
        ({}, ("train.max_grad_norm=1.0",), "train.max_grad_norm and gradient_clipping do not agree"),
        ({}, ("train.strategy=fsdp",), "train.strategy and zero_optimization.stage do not agree"),
        ({}, ("train.lr_scheduler_type=cosine",), "train.lr_scheduler_type and scheduler.type do not agree"),
        ({"bf16": {"enabled": True}}, (), "train.precision and bf16.enabled do not agree"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, (), "fp16 and bf16 are both enabled"),
        ({"zero_optimization": {}}, (), "DeepSpeed's ZeRO stage is missing"),
        ({"zero_optimization": {"stage": "auto"}}, (), "DeepSpeed's ZeRO stage is missing"),
        (
            {},
            ("train.strategy=zero3",),
            "train.strategy and zero_optimization.stage do not agree\n  where:  the recipe and {path}\n"
            '  wanted: train.strategy = "zero3", as the recipe says\n'
            "  found:  zero_optimization.stage = 2, in my ds.json\n",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, (), "weights are offloaded, but"),
        (
            {"scheduler": {"params": {"total_num_steps": 5}, "type": "auto"}},
            ("train.warmup_steps=0",),
            "train.steps and scheduler.params.total_num_steps do not agree",
        ),
        (
            {"zero_optimization": {**GIVEN["zero_optimization"], "offload_param": {"device": "cpu"}}},
            (),
            "the recipe with {path} has 1 error\n  found:  train   offload = all needs strategy zero3, but it is zero2",
        ),
        ({"zero_optimization": {"stage": 0}}, (), "DeepSpeed's ZeRO stage is missing"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, (), "dray offloads to the host's"),
        ({"optimizer": {"type": "Lamb"}}, (), "dray trains with AdamW"),
        ({"fp16": {"min_loss_scale": 1e-10}}, (), "DeepSpeed needs a whole number as its smallest loss scale"),
        ({"scheduler": {"type": "OneCycle"}}, (), "dray does not know this schedule"),
    ],
)  # fmt: skip
def test_what_does_not_agree_is_said_with_both_places(tmp_path: Path, change: dict, words: tuple, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        agreed(tmp_path, {**GIVEN, **change}, *words)
    assert str(refused.value).startswith(said.replace("{path}", str(tmp_path / "my ds.json")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Since 3.13 Python points at the comma itself.
        (
            '{\n "gradient_clipping": 1.0,\n}',
            "line 2, column 26" if sys.version_info >= (3, 13) else "line 3",
        ),
        ("{\n // a word\n}", "line 2, column 2"),
        ("[]", "the DeepSpeed file is not a JSON object"),
        ("", "line 1, column 1"),
    ],
)
def test_what_is_not_json(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        agreed(tmp_path, text)
    assert said in str(refused.value)


def test_the_stage_may_be_the_recipes(tmp_path: Path) -> None:
    said = {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}
    train = agreed(tmp_path, said, "train.strategy=zero3", "train.offload=all").train
    assert train
    assert (train.strategy, train.offload) == ("zero3", "all")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the DeepSpeed file cannot be read"):
        read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["train.deepspeed=deepspeed/none.json"])
