"""What a recipe says of dray's own trainer: the batch, the text, the model, the loop and what is kept."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dray.config.model import Spec

Count = Annotated[int, Field(ge=1)]
Scalar = str | int | float | bool


class Batch(Spec):
    """How many samples make one optimizer step. The global size is the promise; the rest follows from the world."""

    global_size: Count
    """Samples in one optimizer step over all ranks."""
    per_device: Count | None = None
    """Samples that one rank takes at once. Left out: as many as the world and the accumulation leave."""
    accumulation: Count | None = None
    """Backward passes before one optimizer step. Left out: as many as it takes to reach the global size."""


class Data(Spec):
    """What is trained on."""

    text: str = "builtin"
    """What is learnt: `builtin` (a small made-up language, the same bytes every time); a file, a folder or a pattern of
    txt, json, jsonl, csv, tsv, parquet or arrow, a document a line or row; or
    `hub:OWNER/NAME[/SUBSET][:SPLIT[+SPLIT]]`. A relative path starts at the recipe's own folder."""
    validation: str = ""
    """What is evaluated, said likewise. Left out: the last documents of the text."""
    test: str = ""
    """What is evaluated once, after training."""
    validation_percent: Annotated[int, Field(ge=1, le=50)] = 5
    """Share of the documents kept for evaluation where `validation` is left out."""
    column: str = "text"
    """Which column or key holds a document, where there are several; with train.objective = "answers" a conversation, a
    list of messages with role and content."""
    answer: str = ""
    """With train.objective = "answers": the column of the answers, where `column` is that of the questions."""
    min_characters: Annotated[int, Field(ge=0)] = 0
    """Shorter documents are left out; a conversation counts with the names of its roles."""
    block: Annotated[int, Field(ge=2)] = 128
    """Tokens in one sample. Documents are put in a row and cut into blocks; not one token is left out."""
    apart: bool = False
    """Whether attention stops at the end of a document, where a block holds several."""
    samples: Annotated[int, Field(ge=0)] = 0
    """At most so many blocks to learn from; 0 is all."""
    validation_samples: Annotated[int, Field(ge=0)] = 0
    """At most so many blocks for evaluation and for the test; 0 is all."""
    streaming: bool = False
    """Turn text into tokens while training, and keep none on the disk: for what is larger than a node's disk."""
    cache: str = ""
    """Where a node keeps texts as tokens, made once; else a folder in /tmp."""


class Model(Spec):
    """The network: one that exists, by name, or a new one of a type that transformers knows."""

    name: str = ""
    """A model of the hub, or a folder that `save_pretrained` made (with a `/` or `.` at the start; a relative one
    starts at the recipe's own folder)."""
    revision: str = "main"
    """The hub's commit, tag or branch."""
    weights: bool = True
    """Whether the named model's weights are taken, or its configuration alone."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the named model may run."""
    type: str = "gpt2"
    """A model type that transformers knows, where there is no name."""
    config: dict[str, Scalar | list[Any] | dict[str, Any]] = {}
    """Settings of the configuration, by transformers' own names. Vocabulary size comes from the tokenizer."""
    tokenizer: str = ""
    """A tokenizer, said like a name. Left out: the named model's own, or one token a byte."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """Which of transformers' attention functions; auto is sdpa, or eager where a model has no other."""
    dtype: Literal["fp32", "bf16", "auto"] = "fp32"
    """Type of the weights that the optimizer moves; auto is the named model's own."""


class Train(Spec):
    """The loop."""

    steps: Count | None = None
    """Optimizer steps."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the text, in place of steps."""
    objective: Literal["causal", "masked", "answers"] = "causal"
    """causal: each token is foretold from those before it. masked: hidden tokens are, from all around them. answers: as
    causal, of conversations in the model's chat template, and only what the assistant says is to be foretold."""
    masked_percent: Annotated[float, Field(gt=0, lt=100)] = 15.0
    """Share of the tokens that are to be foretold, where the objective is masked."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises; it reaches its peak with the last of them."""
    schedule: Literal["linear", "cosine", "constant", "polynomial", "restarts"] = "cosine"
    """How the learning rate falls after the warm-up; restarts: a cosine that begins anew."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Of schedule polynomial: 1 is linear."""
    cycles: Count = 1
    """Of schedule restarts: how many cosines there are."""
    final_lr: Annotated[float, Field(ge=0)] = 0.0
    """What it falls to."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """How slowly AdamW's two averages forget."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """What keeps AdamW from dividing by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of AdamW, for matrices; biases and norms have none."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the matrix products; weights stay in 32 bits (model.dtype)."""
    loss_scale: Annotated[float, Field(ge=1)] = 4096.0
    """fp16 alone: what losses are multiplied by at first; it then finds its own value."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seeds weights, data order and dropout."""
    log_every: Count = 10
    """Steps between two lines of metrics."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Norm to which gradients are scaled down; 0 leaves them."""
    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = "ddp"
    """ddp: each rank has the whole model. fsdp: each has a part of weights, gradients and optimizer. zero1 to zero3:
    DeepSpeed's stages, which part the optimizer, the gradients and the weights in turn."""
    offload: Literal["", "optimizer", "all"] = ""
    """What the host's memory holds in place of the GPU's, with zero1 to zero3; all is the weights, too (zero3)."""
    compile: bool = False
    """Whether the model is compiled: slower to its first step, faster from then on."""
    recompute: bool = False
    """Whether activations are computed again in the backward pass instead of kept (gradient checkpointing)."""
    deepspeed: str | None = None
    """A DeepSpeed JSON file; it decides the strategy. What it says `auto` for, the recipe decides; where both speak,
    they must agree. A relative path starts beside the recipe."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations; 0 is after training alone."""
    attention_stats: bool = False
    """Whether the smallest and the largest attention score of each layer are logged."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Where metrics also go; offline, unless these programs' own variables say otherwise."""

    @model_validator(mode="after")
    def _goes_together(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            both = f"both are set: steps = {self.steps}, epochs = {self.epochs}"
            raise ValueError(f"expected one of steps and epochs; {'neither is set' if self.steps is None else both}")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps} is more than steps = {self.steps}")
        for name, value, schedule in (("power", self.power, "polynomial"), ("cycles", self.cycles, "restarts")):
            if value != 1 and self.schedule != schedule:
                raise ValueError(f"{name} = {value} is of schedule {schedule}, and it is {self.schedule}")
        if self.final_lr > self.lr:
            raise ValueError(f"final_lr = {self.final_lr} is more than lr = {self.lr}")
        stages = {"": self.strategy, "optimizer": "zero1, zero2 or zero3", "all": "zero3"}[self.offload]
        unread = self.deepspeed is not None and not self.deepspeed.startswith("{")  # its stage is not known yet
        if self.offload and self.strategy not in stages and not unread:
            raise ValueError(f"offload = {self.offload} wants strategy {stages}, and it is {self.strategy}")
        return self


class Lora(Spec):
    """Small matrices beside the model's own are trained, and the model's own stay as they are (LoRA, by peft)."""

    on: bool = True
    """Whether it is done: off, the same recipe trains all weights."""
    rank: Count = 16
    """Their inner size."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What they add is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of their inputs that is left out in training."""
    targets: tuple[str, ...] = ()
    """Ends of the names of the layers that get them, such as q_proj; left out: all linear layers but the head."""


class Evaluation(Spec):
    """One more text to evaluate, beside data.validation."""

    text: str
    """Said as data.text is."""
    column: str = ""
    """Which column holds a document; left out: as data.column."""
    stride: Annotated[int, Field(ge=0)] = 0
    """Tokens from one window to the next: each is foretold from at least data.block - stride before it. 0: blocks side
    by side."""
    last_word: bool = False
    """Whether only the last word of each document is to be foretold; loss and accuracy are then by words."""
    samples: Annotated[int, Field(ge=0)] = 0
    """At most so many blocks, or documents with last_word; 0 is all."""

    @model_validator(mode="after")
    def _one_way(self) -> Evaluation:
        if self.stride and self.last_word:
            raise ValueError("stride and last_word are two ways to evaluate a text; name it twice to have both")
        return self


class Checkpoint(Spec):
    """What a run keeps, so that another may go on from there."""

    every: tuple[tuple[Annotated[int, Field(ge=0)], Count], ...] = ()
    """Pairs of how far and how often: [[100, 10], [0, 50]] is every 10 steps until step 100, then every 50 for ever. A
    number alone is for ever. Left out: none before the end."""
    at_start: bool = False
    """Whether there is one of step 0, too: the weights before they learnt anything. It goes as others do, when there
    are `keep` newer ones."""
    keep: Count = 2
    """How many of the newest stay."""
    folder: str = ""
    """Where they are kept and looked for; else in the run's own folder. With one, the same command goes on where the
    last was cut off, requeued or typed again. A relative path starts at the recipe's own folder."""

    @field_validator("every", mode="before")
    @classmethod
    def _number_alone(cls, said: object) -> object:
        if isinstance(said, int):
            return ((0, said),)
        return (
            tuple(tuple(pair) if isinstance(pair, list) else pair for pair in said) if isinstance(said, list) else said
        )

    @field_validator("every")
    @classmethod
    def _ascending(cls, every: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        untils = [until or math.inf for until, _ in every]
        if untils != sorted(set(untils)):
            raise ValueError("expected pairs that reach further each, such as [[100, 10], [0, 50]]; 0 is for ever")
        return every
