"""What the trainer needs of plan.json, typed. The plan was validated when it was made; here it is only read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Data:
    """The recipe's [data]."""

    train: str
    validation: str
    test: str
    validation_split_percentage: int
    column: str
    answer_column: str
    min_characters: int
    sequence_length: int
    document_mask: bool
    max_train_samples: int
    max_eval_samples: int
    streaming: bool
    cache_dir: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One of the recipe's [evaluate]."""

    dataset: str
    column: str
    stride: int
    last_word: bool
    max_samples: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """The recipe's [model]."""

    name: str
    revision: str
    weights: bool
    trust_remote_code: bool
    type: str
    config: dict[str, Any]
    tokenizer: str
    attn_implementation: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run, as this rank sees it: the recipe's [train], the batch and where it happens."""

    name: str
    folder: str
    run_folder: str
    name_variable: str
    variant: str
    global_size: int
    per_device: int
    gradient_accumulation_steps: int
    data: Data
    model: Model
    steps: int  # 0 until the text's length is known, where the recipe says epochs
    epochs: float
    objective: str
    mlm_probability: float
    lr: float
    warmup_steps: int
    lr_scheduler_type: str
    lr_power: float
    lr_cycles: int
    min_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    precision: str
    initial_loss_scale: float
    seed: int
    log_every: int
    max_grad_norm: float
    strategy: str
    offload: str
    compile: bool
    activation_checkpointing: bool
    deepspeed: dict[str, Any]
    eval_every: int
    attention_stats: bool
    trackers: tuple[str, ...]
    every: tuple[tuple[int, int], ...]
    at_start: bool
    keep: int
    checkpoints: str
    about: dict[str, Any]
    evaluate: dict[str, Evaluation]
    lora: dict[str, Any] | None
    analog: dict[str, Any] | None
    recipe: dict[str, Any]  # as it stands in the plan, for who wants to tell of it

    @property
    def step_tokens(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.global_size * self.data.sequence_length


def read(path: str) -> Config:
    """The plan's part that is about training."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))
    recipe = plan["recipe"]
    train = dict(recipe["train"])
    train |= {"steps": train["steps"] or 0, "epochs": train["epochs"] or 0.0}
    train["deepspeed"] = json.loads(train["deepspeed"] or "{}")
    return Config(
        name=recipe["name"],
        folder=plan["folder"],
        run_folder=plan["run_folder"],
        name_variable=plan["world"]["identity"]["name"],
        variant=plan["variant"],
        **plan["batch"],
        data=Data(**recipe["data"]),
        model=Model(**recipe["model"]),
        **train,
        every=tuple((until, each) for until, each in recipe["checkpoint"]["every"]),
        at_start=recipe["checkpoint"]["at_start"],
        keep=recipe["checkpoint"]["keep"],
        checkpoints=recipe["checkpoint"]["folder"] or f"{plan['run_folder']}/checkpoints",
        evaluate={name: Evaluation(**one) for name, one in recipe["evaluate"].items()},
        lora=recipe["lora"] if recipe["lora"] and recipe["lora"]["enabled"] else None,
        analog=recipe["analog"] if recipe["analog"] and recipe["analog"]["enabled"] else None,
        recipe={key: recipe[key] for key in ("batch", "data", "model", "train", "evaluate", "lora", "analog")},
        about={"run": plan["run"], "image_sha256": plan["image_sha256"], "dray": plan["dray"]},
    )
