"""The recipe's sections as dataclasses; tests/unit/config/test_train_recipe.py writes this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Source:
    """One dataset of a mix."""

    dataset: str
    column: str
    map: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class Data:
    """The datasets, and how they become samples."""

    train: str
    mix: dict[str, Source]
    validation: str
    test: str
    validation_split_percentage: int
    column: str
    answer_column: str
    map: str
    config_kwargs: dict[str, Any]
    min_characters: int
    sequence_length: int
    packing: str
    document_mask: bool
    max_train_samples: int
    max_eval_samples: int
    streaming: bool
    cache_dir: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: an existing one by name, or a new one of a type that transformers knows."""

    name: str
    revision: str
    weights: bool
    trust_remote_code: bool
    type: str
    config: dict[str, Any]
    tokenizer: str
    tokenizer_revision: str
    attn_implementation: str
    pad_to_multiple_of: str | int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Train:
    """The training loop of dray's trainer."""

    steps: int | None
    epochs: float | None
    objective: str
    loss: str
    mlm_probability: float
    lr: float
    warmup_steps: int
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any]
    sequence_length_warmup: tuple[tuple[int, int], ...]
    min_lr: float
    optimizer: str
    ema_decay: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    precision: str
    tf32: bool
    initial_loss_scale: float
    seed: int
    deterministic: bool
    log_every: int
    max_grad_norm: float
    strategy: str
    fsdp_shard: str | int
    reshard_after_forward: str | bool
    offload: str
    compile: str | bool
    activation_checkpointing: bool
    deepspeed: str | None
    eval_every: int
    attention_stats: bool
    profile: str
    trackers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (LoRA, by peft): only the adapters are trained; the model's own weights are frozen."""

    enabled: bool
    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One more dataset to evaluate, in addition to data.validation."""

    dataset: str
    column: str
    map: str
    stride: int
    last_word: bool
    max_samples: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The checkpoints of a run, from which it or another run can resume."""

    every: tuple[tuple[int, int], ...]
    at_start: bool
    keep: int
    final: bool
    folder: str
    mirror: str


@dataclass(frozen=True, kw_only=True)
class Analog:
    """Linear layers become analog ones: quantised inputs, noisy and clipped weights."""

    enabled: bool
    exclude: tuple[str, ...]
    clip_type: str
    clip_sigma: float
    forward_inp_res: int
    forward_out_noise: float
    forward_out_noise_per_channel: bool
    forward_out_res: int
    forward_out_bound: float
    mapping_max_input_size: int
    modifier_type: str
    modifier_std_dev: float
    input_range_enable: bool
    input_range_learn_input_range: bool
    input_range_init_value: float
    input_range_init_from_data: int
    input_range_init_std_alpha: float
    input_range_decay: float
    input_range_input_min_percentage: float
    input_range_fast_mode: bool
