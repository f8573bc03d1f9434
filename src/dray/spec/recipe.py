"""A recipe: one training run as a flat TOML file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dray.spec.image import Variant
from dray.spec.model import Spec

Count = Annotated[int, Field(ge=1)]
Launcher = Literal["torchrun"]
Scalar = str | int | float | bool


_SECRET_NAMES = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "APIKEY", "KEY", "PAT", "CREDENTIALS"}
_SECRET_VALUES = ("hf_", "sk-", "ghp_", "github_pat_")
_OURS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


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
    """`builtin` (a small made-up language, the same bytes every time) or a text file, one document a line. A relative
    path starts at the recipe's own folder."""
    validation_percent: Annotated[int, Field(ge=1, le=50)] = 5
    """Share of the documents kept for evaluation, taken from the end."""
    block: Annotated[int, Field(ge=2)] = 128
    """Tokens in one sample."""


class Model(Spec):
    """The network, made from a transformers configuration."""

    type: str = "gpt2"
    """A causal model type that transformers knows."""
    config: dict[str, Scalar] = {}
    """Settings of that type's configuration, by transformers' own names. Vocabulary size comes from the tokenizer."""


class Train(Spec):
    """The loop."""

    steps: Count
    """Optimizer steps."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from zero."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of AdamW."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Type of the matrix products; weights stay in 32 bits."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seeds weights, data order and dropout."""
    log_every: Count = 10
    """Steps between two lines of metrics."""


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
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    """Environment of every rank. Wins over the site's and over dray's own."""
    batch: Batch
    data: Data = Data()
    model: Model = Model()
    train: Train

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
                f"{', '.join(secrets)}: this looks like a secret, and every run folder holds its recipe; leave it out"
            )
        ours = [name for name in env if name in _OURS or name.startswith(("SLURM_", "DRAY_"))]
        if ours:
            raise ValueError(f"{', '.join(ours)}: the scheduler and the launcher set this; leave it out")
        return env
