"""A recipe: one training run as a flat TOML file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dray.spec.image import Variant
from dray.spec.model import Spec

Count = Annotated[int, Field(ge=1)]
Launcher = Literal["torchrun", "accelerate", "deepspeed", "python"]
Scalar = str | int | float | bool


_SECRET_NAMES = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "APIKEY", "KEY", "PAT", "CREDENTIALS"}
_SECRET_VALUES = ("hf_", "sk-", "ghp_", "github_pat_")
_OURS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_SHELLS = re.compile(r"~|.*\$\{?[A-Za-z_]", re.DOTALL)
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


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
    txt, json, jsonl, csv, tsv, parquet or arrow, a document a line or row; or `hub:OWNER/NAME[/SUBSET][:SPLIT]`. A
    relative path starts at the recipe's own folder."""
    validation: str = ""
    """What is evaluated, said likewise. Left out: the last documents of the text."""
    test: str = ""
    """What is evaluated once, after training."""
    validation_percent: Annotated[int, Field(ge=1, le=50)] = 5
    """Share of the documents kept for evaluation where `validation` is left out."""
    column: str = "text"
    """Which column or key holds a document, where there are several."""
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
    config: dict[str, Scalar] = {}
    """Settings of the configuration, by transformers' own names. Vocabulary size comes from the tokenizer."""
    tokenizer: str = ""
    """A tokenizer, said like a name. Left out: the named model's own, or one token a byte."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] = "sdpa"
    """Which of transformers' attention functions."""
    dtype: Literal["fp32", "bf16", "auto"] = "fp32"
    """Type of the weights that the optimizer moves; auto is the named model's own."""


class Train(Spec):
    """The loop."""

    steps: Count | None = None
    """Optimizer steps."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the text, in place of steps."""
    objective: Literal["causal", "masked"] = "causal"
    """causal: each token is foretold from those before it. masked: hidden tokens are, from all around them."""
    masked_percent: Annotated[float, Field(gt=0, lt=100)] = 15.0
    """Share of the tokens that are to be foretold, where the objective is masked."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises; it reaches its peak with the last of them."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
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
        if self.final_lr > self.lr:
            raise ValueError(f"final_lr = {self.final_lr} is more than lr = {self.lr}")
        stages = {"": self.strategy, "optimizer": "zero1, zero2 or zero3", "all": "zero3"}[self.offload]
        unread = self.deepspeed is not None and not self.deepspeed.startswith("{")  # its stage is not known yet
        if self.offload and self.strategy not in stages and not unread:
            raise ValueError(f"offload = {self.offload} wants strategy {stages}, and it is {self.strategy}")
        return self


class Preflight(Spec):
    """What the nodes prove to one another before the launch."""

    when: Literal["several", "always", "never"] = "several"
    """On several nodes, on one too, or not at all."""
    within: Count = 60
    """Seconds that all collectives together may take, once all ranks are there (meet_within)."""
    megabytes: Count = 64
    """The largest message of the bandwidth sweep."""
    free_gb: Annotated[float, Field(ge=0)] = 1.0
    """Room that /tmp and the run's folder must have on each node."""
    shared_memory_gb: Annotated[float, Field(ge=0)] = 0.5
    """Size that /dev/shm must have."""


class Checkpoint(Spec):
    """What a run keeps, so that another may go on from there."""

    every: tuple[tuple[Annotated[int, Field(ge=0)], Count], ...] = ()
    """Pairs of how far and how often: [[100, 10], [0, 50]] is every 10 steps until step 100, then every 50 for ever. A
    number alone is for ever. Left out: none before the end."""
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


class Command(Spec):
    """A program of the user's own, in the place of dray's trainer; the launcher starts it on every rank."""

    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments. A first word that ends in .py is run by the image's Python."""
    folder: str = "."
    """Where it runs; ranks may write there. A relative path starts at the recipe's own folder."""


class Recipe(Spec):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Short name: small letters, digits, `.`, `_` and `-`. The run's folder carries it."""
    about: str = ""
    """One line that says what it is for."""
    image: Variant = "cpu"
    """The image's variant."""
    image_digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """The SHA-256 that the SIF must have, as `dray image build` prints it."""
    launcher: Launcher = "torchrun"
    """What starts the ranks in the container."""
    nodes: Count = 1
    """Nodes to ask for. What the scheduler really gave wins."""
    ranks_per_node: Count | None = None
    """Ranks on a node where no GPUs are given. With GPUs there is one rank for each."""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the first node where ranks meet. Left out: derived from the job's number, and probed."""
    meet_within: Count = 120
    """Seconds in which all nodes must have met before the launch is given up."""
    env: dict[Annotated[str, Field(pattern=_VARIABLE)], str] = {}
    """Environment of every rank. Wins over the site's and over dray's own."""
    pass_env: tuple[Annotated[str, Field(pattern=_VARIABLE)], ...] = ()
    """Variables that ranks get with the value that they have where the job was submitted, such as HF_TOKEN."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often torchrun starts all ranks again after one has died. Ranks then follow the order in which nodes come."""
    accelerate: str | None = None
    """A configuration file of accelerate's, in the place of dray's own. A relative path starts beside the recipe."""
    preflight: Preflight = Preflight()
    command: Command | None = None
    batch: Batch | None = None
    data: Data = Data()
    model: Model = Model()
    train: Train | None = None
    checkpoint: Checkpoint = Checkpoint()

    def all_places(self) -> dict[str, str]:
        """Those, and the folders where something is kept."""
        kept = {"checkpoint.folder": self.checkpoint.folder, "data.cache": self.data.cache}
        return self.places() | {key: place for key, place in kept.items() if place}

    def places(self) -> dict[str, str]:
        """The keys that name a file or folder to read, and what they name; not what is built in or the hub's."""
        data = {f"data.{name}": getattr(self.data, name) for name in ("text", "validation", "test")}
        model = {f"model.{name}": getattr(self.model, name) for name in ("name", "tokenizer")}
        files = {key: said for key, said in data.items() if said not in ("", "builtin") and not said.startswith("hub:")}
        return files | {key: said for key, said in model.items() if said.startswith(("/", "."))}

    @field_validator("pass_env")
    @classmethod
    def _only_the_jobs_own(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        _refuse_ours(names)
        return names

    @model_validator(mode="after")
    def _one_program(self) -> Recipe:
        missing = [name for name in ("batch", "train") if getattr(self, name) is None]
        if self.command and PurePosixPath(self.command.folder) == PurePosixPath("/"):
            raise ValueError("command.folder is /, which would hide the image's own files; name the program's folder")
        if self.command is None and missing:
            raise ValueError(f"missing: expected {' and '.join(f'[{name}]' for name in missing)}, or [command] argv")
        if self.command and (self.batch or self.train):
            raise ValueError("[batch] and [train] are for dray's own trainer, and [command] is in its place")
        both = [name for name in self.pass_env if name in self.env]
        if both:
            raise ValueError(f"{', '.join(both)}: in env and in pass_env; one of the two decides its value")
        if self.train and (self.train.steps is None) == (self.train.epochs is None):
            raise ValueError("train: expected one of steps and epochs")
        if self.data.streaming and (self.train is None or self.train.steps is None):
            raise ValueError("data.streaming: nobody knows how long a stream is; set train.steps, not train.epochs")
        if self.data.streaming and not self.data.validation:
            raise ValueError("data.streaming wants data.validation: a stream has no last documents to evaluate")
        if self.data.streaming and self.data.text == "builtin":
            raise ValueError("data.streaming wants data.text: what is built in is no stream")
        for key, place in self.all_places().items():
            if _SHELLS.match(place) or "*" in str(PurePosixPath(place).parent):
                raise ValueError(
                    f"{key} = {place}: it is taken as it stands; ~ and $ are the shell's, and * may be in a file's "
                    "name alone (a folder is searched whole)"
                )
        if self.restarts and self.launcher != "torchrun":
            raise ValueError("restarts is torchrun's; no other launcher can start ranks again")
        if self.accelerate and self.launcher != "accelerate":
            raise ValueError(f"accelerate names a file for that launcher, and the launcher is {self.launcher}")
        return self

    @field_validator("env")
    @classmethod
    def _only_the_recipes_own(cls, env: dict[str, str]) -> dict[str, str]:
        secrets = [
            name
            for name, value in env.items()
            if _SECRET_NAMES & set(name.upper().split("_")) or value.startswith(_SECRET_VALUES)
        ]
        if secrets:
            raise ValueError(
                f"{', '.join(secrets)}: this looks like a secret, and every run folder holds its recipe; set it where "
                "you submit and name it in pass_env"
            )
        _refuse_ours(env)
        return env


def _refuse_ours(names: Iterable[str]) -> None:
    ours = [name for name in names if name in _OURS or name.startswith(("SLURM_", "DRAY_"))]
    if ours:
        raise ValueError(f"{', '.join(ours)}: the scheduler and the launcher set this; leave it out")
