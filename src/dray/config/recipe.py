"""A recipe: one training run as a flat TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_origin

from pydantic import Field, field_validator, model_validator

from dray.config.analog import Analog
from dray.config.checkpoint import Checkpoint
from dray.config.data import Data
from dray.config.image import ADOPTED_OR_FILE, Fingerprint, Variant
from dray.config.model import SecretError, Spec
from dray.config.preflight import Preflight
from dray.config.runs import HangTimeout, Runs
from dray.config.training import STRATEGIES, Batch, Count, Evaluation, Lora, Model, Strategy, Train
from dray.contract import dataset, secrets

Launcher = Literal["torchrun", "accelerate", "deepspeed", "python", "ray"]
_OURS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_HUB = re.compile(r"hub:[^/:@\s]+/[^/:@\s]+(@[\w.-]+)?(/[^/:@\s]+)?(:[^/\s]+)?")
_SHELLS = re.compile(r"~|.*\$\{?[A-Za-z_]", re.DOTALL)
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_LAYER = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}|[^\x00-\x1f\x7f]+\.sif")


class Command(Spec):
    """Your own program instead of dray's trainer; the launcher starts it on every rank."""

    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments. A first word that ends in .py is run by the image's Python."""
    folder: str = "."
    """The program's working folder, to which ranks may write. A relative path starts at the recipe's own folder."""
    strategy: Strategy | None = None
    """With launcher = "accelerate", the configuration that a script's Accelerator() finds. ddp: each rank has the whole
    model (default). fsdp: FSDP2, a transformer's layers wrapped, sharded checkpoints. zero1 to zero3: DeepSpeed."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """The mixed precision of accelerate's configuration. Left out: fp32, which is accelerate's `no`."""
    deepspeed: str | None = None
    """A DeepSpeed JSON file for accelerate; it decides the strategy. A relative path starts beside the recipe."""

    @model_validator(mode="after")
    def _deepspeed_has_16_bits(self) -> Command:
        if self.deepspeed and self.precision == "fp8":
            raise ValueError("precision = fp8 is for accelerate alone; a DeepSpeed file takes bf16 and fp16")
        return self

    @field_validator("argv")
    @classmethod
    def _shows_no_secret(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        if tokens := secrets.in_command(argv):
            raise SecretError(
                f"{', '.join(tokens)}: this looks like a secret, and `ps`, Slurm and every run folder show a command; "
                "export it where you submit, name it in pass_env, and let the program read it there, or a shell: "
                "bash -c 'exec python train.py --token \"$HF_TOKEN\"'"
            )
        return argv


class Recipe(Spec):
    """One training run."""

    selects = "scale"
    lists = "dray recipe keys"
    version: Literal[1] = 1
    """The version of these keys. dray refuses recipes of other versions; CHANGELOG.md lists the changes."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Short name: small letters, digits, `.`, `_` and `-`. It is part of the run folder's name."""
    about: str = ""
    """One line that says what the recipe is for."""
    scale: Literal["whole", "tiny"] = "whole"
    """tiny: use the settings in [tiny], for a run of about a minute with a small model and a small dataset."""
    tiny: dict[str, Any] = {}
    """Settings for scale = tiny: any keys of a recipe."""
    image: Variant = "cpu"
    """The image's variant."""
    adopted: Annotated[str, Field(pattern=ADOPTED_OR_FILE)] | None = None
    """An image that somebody else made: the absolute path of a SIF, or the name that `dray image adopt` gave it."""
    image_digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """The SHA-256 that the SIF must have, as `dray image build` prints it."""
    image_signers: tuple[Fingerprint, ...] = ()
    """Fingerprints of keys, one of which must have signed the SIF. Each node checks it before it starts the image."""
    layer: str | None = None
    """Your own packages in addition to the image's: the name of a layer of `dray image layer`, or its SIF."""
    layer_digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """The SHA-256 that the layer must have, as `dray image layer` prints it."""
    launcher: Launcher = "torchrun"
    """The launcher that starts the ranks in the container."""
    nodes: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Nodes to request. If the scheduler gives another number, dray uses that."""
    ranks_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ranks on a node without GPUs. With GPUs, each GPU has one rank."""
    gpus: Literal["all", "none"] = "all"
    """none: a job with GPUs may run the cpu image, on its processors. Left out: dray refuses such a job."""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of the first node, for the rendezvous and torch's store. Default: a free one."""
    rendezvous_timeout_s: Count = 120
    """Seconds within which all nodes must join the rendezvous; after that the run ends."""
    env: dict[Annotated[str, Field(pattern=_VARIABLE)], str] = {}
    """Environment variables of every rank. They override the site's and dray's own."""
    pass_env: tuple[Annotated[str, Field(pattern=_VARIABLE)], ...] = ()
    """Variables of the submitting shell that ranks get, such as HF_TOKEN."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often dray restarts all ranks after one has failed."""
    spares: Annotated[int, Field(ge=0, le=1024)] = 0
    """Spare nodes of the job, in addition to `nodes`. If a node fails, a spare one takes its place."""
    min_nodes: Annotated[int, Field(ge=0, le=65_536)] = 0
    """If a node fails and none is spare, the run goes on with fewer nodes, but at least this many, and
    with the same global batch. 0: the run ends."""
    max_requeues: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often dray requeues the job, if it has saved steps. 0: never. See docs/survive.md."""
    requeue: Literal["normal", "expedite"] = "normal"
    """normal: Slurm starts a requeued job after two minutes. expedite: at once, where Slurm is 25.11 or later and
    allows it; `dray submit` asks for it (sbatch --requeue=expedite)."""
    drain: Literal["stay", "leave"] = "stay"
    """leave: where Slurm drains a node of the job, the run saves and ends with 75 within about a minute, so that
    max_requeues brings it back on other nodes. stay: it goes on until the job ends."""
    grace_s: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Seconds before the time limit at which Slurm asks the run to save and end. Default: the site's, else 120."""
    hang_timeout_s: HangTimeout | None = None
    """Seconds without progress after which a run ends as hung (75); dray names the rank that hangs. 0: never.
    Left out: dray's trainer decides by its own steps, and a command is not watched. See docs/survive.md."""
    accelerate: str | None = None
    """The script's configuration file for accelerate, YAML or JSON, beside the recipe. [command] wins over it."""
    preflight: Preflight = Preflight()
    runs: Runs = Runs()
    command: Command | None = None
    batch: Batch | None = None
    data: Data = Data()
    model: Model = Model()
    train: Train | None = None
    evaluate: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")], Evaluation] = {}
    """More datasets to evaluate. Metrics use the names given here."""
    checkpoint: Checkpoint = Checkpoint()
    lora: Lora | None = None
    analog: Analog | None = None

    @property
    def choices(self) -> list[str]:
        """`key=value` of each key with a few words to choose from: bash reads them without quoting."""
        fields = type(self).model_fields.items()
        names = [name for name, field in fields if get_origin(field.annotation) is Literal and name != "version"]
        return [f"{name}={getattr(self, name)}" for name in names]

    @property
    def replaces_nodes(self) -> bool:
        """Whether the job continues when it loses a node."""
        return bool(self.spares or self.min_nodes)

    @property
    def has_lora(self) -> bool:
        """Whether adapters are trained, and not the model's own weights."""
        return self.lora is not None and self.lora.enabled

    @property
    def has_analog(self) -> bool:
        """Whether layers of the model become analog."""
        return self.analog is not None and self.analog.enabled

    def with_values(self, section: str, **values: object) -> Recipe:
        """The recipe with other values in one of its tables."""
        table = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: table})

    @property
    def image_name(self) -> str:
        """NAME of the image's file, dray-NAME.sif."""
        return self.adopted or self.image

    def all_places(self) -> dict[str, str]:
        """The files to read, and the folders to write to."""
        folders = ("checkpoint.folder", self.checkpoint.folder), ("checkpoint.mirror", self.checkpoint.mirror_folder)
        kept = dict((*folders, ("data.cache_dir", self.data.cache_dir)))
        return self.places() | {key: place for key, place in kept.items() if place}

    def datasets(self) -> dict[str, str]:
        """The keys that name a dataset, with the datasets."""
        data = {f"data.{name}": getattr(self.data, name) for name in ("train", "validation", "test")}
        data |= {f"data.mix.{name}.dataset": one.dataset for name, one in self.data.mix.items()}
        return data | {f"evaluate.{name}.dataset": one.dataset for name, one in self.evaluate.items()}

    def maps(self) -> dict[str, str]:
        """The keys that name a function on rows, with the functions."""
        maps = {"data.map": self.data.map}
        maps |= {f"data.mix.{name}.map": one.map for name, one in self.data.mix.items()}
        maps |= {f"evaluate.{name}.map": one.map for name, one in self.evaluate.items()}
        return {key: named for key, named in maps.items() if named}

    def places(self) -> dict[str, str]:
        """The keys that name a file or folder to read, with the paths; not built-in datasets or those of the hub."""
        model = {f"model.{name}": getattr(self.model, name) for name in ("name", "tokenizer")}
        files = {key: path for key, name in self.datasets().items() if (path := dataset.parse(name).path)}
        return files | {key: name for key, name in model.items() if name.startswith(("/", "."))}

    @field_validator("pass_env")
    @classmethod
    def _only_the_jobs_own(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        _refuse_ours(names)
        return names

    @model_validator(mode="after")
    def _can_be(self) -> Recipe:
        if self.scale == "tiny" and not self.tiny:
            raise ValueError("scale = tiny: the recipe has no table [tiny] with settings for it")
        train = self.train
        sharding = STRATEGIES[train.strategy if train else "ddp"]
        if self.has_analog and train and not sharding.analog:
            others = ", ".join(name for name, other in STRATEGIES.items() if other.analog)
            raise ValueError(f"[analog] needs {others}; train.strategy is {train.strategy}")
        if self.has_analog and self.image in ("cuda12", "rocm", "rocm6"):
            raise ValueError(
                f"[analog] needs the cpu or the cuda image; aihwkit-lightning does not support {self.image}"
            )
        if self.has_analog and self.has_lora:
            raise ValueError("[analog] and [lora] both replace layers of the model; leave one out")
        if self.has_lora and train and not sharding.mixed_dtypes and self.model.dtype != "fp32":
            raise ValueError(
                f'[lora] with train.strategy = "{train.strategy}" wants model.dtype = "fp32", not {self.model.dtype}'
            )
        if self.data.answer_column and train and train.objective != "sft":
            raise ValueError(f'data.answer_column is for train.objective = "sft", but it is {train.objective}')
        if self.data.packing != "wrapped" and train and train.objective == "masked":
            raise ValueError(
                f"data.packing = {self.data.packing} fills samples up, and a masked model would attend to the padding; "
                "set data.packing=wrapped"
            )
        for name, one in self.evaluate.items():
            if one.stride >= self.data.sequence_length:
                raise ValueError(f"evaluate.{name}.stride = {one.stride} must be less than data.sequence_length")
            if (one.stride or one.last_word) and train and train.objective == "masked":
                raise ValueError(f"evaluate.{name}: stride and last_word are for models that predict the next token")
        return self

    @model_validator(mode="after")
    def _begins_with_enough_nodes(self) -> Recipe:
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes = {self.min_nodes}: expected at most nodes, which is {self.nodes}")
        return self

    @model_validator(mode="after")
    def _names_of_datasets_are_complete(self) -> Recipe:
        for key, name in self.datasets().items():
            if name.startswith("hub:") and not _HUB.fullmatch(name):
                raise ValueError(f"{key} = {name}: expected hub:OWNER/NAME[@REVISION][/SUBSET][:SPLIT[+SPLIT]]")
            if wrong := dataset.trouble(name):
                raise (SecretError if dataset.shows_secret(name) else ValueError)(f"{key}: {wrong}")
        if wrong := dataset.kwargs_trouble(self.datasets().values(), self.data.config_kwargs):
            raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _one_program(self) -> Recipe:
        missing = [name for name in ("batch", "train") if getattr(self, name) is None]
        if self.gpus == "none" and self.image != "cpu":
            raise ValueError(f'gpus = "none" is for image = "cpu", but the image is {self.image}; leave one out')
        if self.command and PurePosixPath(self.command.folder) == PurePosixPath("/"):
            raise ValueError("command.folder is /, which would hide the image's own files; name the program's folder")
        if self.command is None and missing:
            raise ValueError(f"missing: expected {' and '.join(f'[{name}]' for name in missing)}, or [command] argv")
        if self.command and (self.batch or self.train):
            raise ValueError("[batch] and [train] are for dray's own trainer, which [command] replaces")
        both = [name for name in self.pass_env if name in self.env]
        if both:
            raise ValueError(f"{', '.join(both)}: in env and in pass_env; leave it out of one")
        if self.data.streaming and (self.train is None or self.train.steps is None):
            raise ValueError("data.streaming: the length of a stream is unknown; set train.steps, not train.epochs")
        if self.data.streaming and not self.data.validation:
            raise ValueError("data.streaming needs data.validation: a stream has no last documents to evaluate")
        if self.data.streaming and self.data.train == "builtin":
            raise ValueError("data.streaming needs data.train: the built-in dataset is not a stream")
        if self.data.mix and self.train and self.train.steps is None:
            raise ValueError("[data.mix] needs train.steps, not train.epochs: each source has its own epochs")
        if both := sorted({*self.data.mix} & {*self.evaluate}):
            raise ValueError(
                f"data.mix.{both[0]} and evaluate.{both[0]}: metrics have one eval-{both[0]}; rename one of them"
            )
        for key, place in self.all_places().items():
            if _SHELLS.match(place) or "*" in str(PurePosixPath(place).parent):
                raise ValueError(
                    f"{key} = {place}: dray does not expand ~ and $; * may be in a file's "
                    "name alone (a folder is searched whole)"
                )
        return self

    @model_validator(mode="after")
    def _layer_has_a_name(self) -> Recipe:
        if self.layer_digest and not self.layer:
            raise ValueError("layer_digest pins a layer, but the recipe has none; set layer")
        if self.layer and self.adopted:
            raise ValueError("layer works with dray's own images, not with adopted; leave one out")
        if self.layer is not None and not _LAYER.fullmatch(self.layer):
            raise ValueError(f"layer = {self.layer!a}: expected a name such as rl, or a file that ends in .sif")
        return self

    @model_validator(mode="after")
    def _launcher_has_what_it_starts(self) -> Recipe:
        if self.launcher == "ray" and (self.train or self.ranks_per_node):
            key = "ranks_per_node" if self.ranks_per_node else "[train]"
            raise ValueError(f"launcher = ray starts [command] on the first node, and does not support {key}")
        if self.accelerate and self.launcher != "accelerate":
            raise ValueError(f"accelerate names a file for that launcher, but the launcher is {self.launcher}")
        if self.accelerate and self.train:
            raise ValueError("accelerate configures a script of yours; dray's trainer is configured in [train]")
        configured = [name for name in ("strategy", "precision", "deepspeed") if getattr(self.command, name, None)]
        if configured and self.launcher != "accelerate":
            names = ", ".join(f"command.{name}" for name in configured)
            raise ValueError(f"{names}: accelerate passes this to a script, but the launcher is {self.launcher}")
        return self

    @field_validator("env")
    @classmethod
    def _only_the_recipes_own(cls, env: dict[str, str]) -> dict[str, str]:
        names = [name for name, value in env.items() if secrets.is_variable(name, value)]
        if names:
            raise ValueError(
                f"{', '.join(names)}: this looks like a secret, and every run folder holds its recipe; set it where "
                "you submit and name it in pass_env"
            )
        _refuse_ours(env)
        return env


def _refuse_ours(names: Iterable[str]) -> None:
    ours = [name for name in names if name in _OURS or name.startswith(("SLURM_", "DRAY_"))]
    if ours:
        raise ValueError(f"{', '.join(ours)}: the scheduler or the launcher sets this; leave it out")
