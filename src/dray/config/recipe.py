"""A recipe: one training run as a flat TOML file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from dray.config.data import Data
from dray.config.image_definition import ADOPTED_OR_FILE, Fingerprint, Variant
from dray.config.load_toml import Count, Natural, NotNegative, SecretError, Spec, Variable
from dray.config.training import STRATEGIES, Analog, Batch, Evaluation, Lora, Model, Strategy, Train
from dray.contract import secrets
from dray.contract.trainer import dataset

Launcher = Literal["torchrun", "accelerate", "deepspeed", "python", "ray"]
_OURS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_HUB = re.compile(r"hub:[^/:@\s]+/[^/:@\s]+(@[\w.-]+)?(/[^/:@\s]+)?(:[^/\s]+)?")
_SHELLS = re.compile(r"~|.*\$\{?[A-Za-z_]", re.DOTALL)
Every = tuple[tuple[Natural, Count], ...]
_URL = re.compile(r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]+(/(?!\.\.?(/|$))[A-Za-z0-9._=-]+)*/?")
_LAYER = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}|[^\x00-\x1f\x7f]+\.sif")
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


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

    def contradictions(self) -> Iterator[str]:
        if self.deepspeed and self.precision == "fp8":
            yield "precision = fp8 is for accelerate alone; a DeepSpeed file takes bf16 and fp16"

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


class Checkpoint(Spec):
    """The checkpoints of a run, from which it or another run can resume."""

    every: Every = ()
    """Pairs [until, every]: [[100, 10], [0, 50]] saves every 10 steps until step 100, then every 50. A single number
    holds to the end. Left out: no checkpoint before the end."""
    at_start: bool = False
    """Whether step 0 is saved too. Its checkpoint is removed like the others, once there are `keep` newer ones."""
    keep: Count = 2
    """How many of the newest checkpoints to keep."""
    final: bool = True
    """Whether the model is saved at the end. false: for a run that only measures, as dray study tune's runs do."""
    folder: str = ""
    """Folder for checkpoints. Left out: in the run folder. With a folder, the same command, requeued or typed again,
    resumes where the last one stopped. A relative path starts at the recipe's own folder. One run at a time uses it."""
    mirror: str = ""
    """Where each checkpoint is copied during training: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or a folder. A run
    resumes from the mirror if it has a newer checkpoint than the folder. It also keeps `keep` of them."""

    @property
    def mirror_folder(self) -> str:
        """The mirror, if it is a folder."""
        return "" if "://" in self.mirror else self.mirror

    @field_validator("mirror")
    @classmethod
    def _a_place(cls, mirror: str) -> str:
        if mirror.startswith("file:///"):
            mirror = mirror.removeprefix("file://")
        if "://" not in mirror:
            return mirror
        if "@" in mirror or "?" in mirror:
            shown = "a URL with a user, a password or a signature would appear in plans and run folders"
            raise SecretError(f"{shown}; export the secret, and name it in pass_env")
        if not _URL.fullmatch(mirror):
            raise ValueError("expected s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a folder")
        return mirror.rstrip("/")

    def contradictions(self) -> Iterator[str]:
        if self.mirror and not self.every:
            yield "mirror copies checkpoints, but none is saved before the end; set checkpoint.every"
        if self.mirror and self.mirror == self.folder:
            yield "mirror is the checkpoint folder itself; name another place"
        untils = [until or math.inf for until, _ in self.every]
        if untils != sorted(set(untils)):
            yield "every: expected pairs whose first numbers increase, such as [[100, 10], [0, 50]]; 0 is the end"

    @field_validator("every", mode="before", json_schema_input_type=Count | Every)
    @classmethod
    def _number_alone(cls, value: object) -> object:
        if type(value) is int:  # true is not a number of steps
            return ((0, value),)
        if isinstance(value, list):
            return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
        return value


class Preflight(Spec):
    """Checks of each node before the rendezvous, and of all nodes together after it."""

    when: Literal["several", "always", "never"] = "several"
    """several: only in runs of several nodes; always: on one node too."""
    timeout_s: Count = 60
    """Seconds that all collectives together may take, after the rendezvous."""
    megabytes: Count = 64
    """The largest message of the bandwidth sweep."""
    free_gb: NotNegative = 1.0
    """Free space that /tmp and the run folder must have on each node."""
    shared_memory_gb: NotNegative = 0.5
    """Size that /dev/shm must have."""
    memory_gb: NotNegative = 0.5
    """Memory that the job must have on each node, both available and allowed by its cgroup."""


class Runs(Spec):
    """The run folder."""

    share: Literal["none", "group"] = "none"
    """Who may read it besides you: no one, or your group. Only you may read the run's secret."""


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
    image_digest: Digest | None = None
    """The SHA-256 that the SIF must have, as `dray image build` prints it."""
    image_signers: tuple[Fingerprint, ...] = ()
    """Fingerprints of keys, one of which must have signed the SIF. Each node checks it before it starts the image."""
    layer: str | None = None
    """Your own packages in addition to the image's: the name of a layer of `dray image layer`, or its SIF."""
    layer_digest: Digest | None = None
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
    env: dict[Variable, str] = {}
    """Environment variables of every rank. They override the site's and dray's own."""
    pass_env: tuple[Variable, ...] = ()
    """Variables of the submitting shell that ranks get, such as HF_TOKEN."""
    max_restarts: Natural = 0
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
    hang_timeout_s: Annotated[int, Field(ge=0, le=604_800)] | None = None
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
        """`key=value` of each key that the batch script reads; a word needs no quoting."""
        return [f"drain={self.drain}"]

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
        places = {
            **self.places(),
            "checkpoint.folder": self.checkpoint.folder,
            "checkpoint.mirror": self.checkpoint.mirror_folder,
            "data.cache_dir": self.data.cache_dir,
        }
        return {key: place for key, place in places.items() if place}

    def datasets(self) -> dict[str, str]:
        """The keys that name a dataset, with the datasets."""
        data = {f"data.{name}": getattr(self.data, name) for name in ("train", "validation", "test")}
        return data | self._of_each_dataset("dataset")

    def maps(self) -> dict[str, str]:
        """The keys that name a function on rows, with the functions."""
        maps = {"data.map": self.data.map, **self._of_each_dataset("map")}
        return {key: named for key, named in maps.items() if named}

    def _of_each_dataset(self, field: str) -> dict[str, str]:
        mix = {f"data.mix.{name}.{field}": getattr(source, field) for name, source in self.data.mix.items()}
        return mix | {f"evaluate.{name}.{field}": getattr(entry, field) for name, entry in self.evaluate.items()}

    def places(self) -> dict[str, str]:
        """The keys that name a file or folder to read, with the paths; not built-in datasets or those of the hub."""
        model = {f"model.{name}": getattr(self.model, name) for name in ("name", "tokenizer")}
        files = {key: path for key, name in self.datasets().items() if (path := dataset.parse(name).path)}
        return files | {key: name for key, name in model.items() if name.startswith(("/", "."))}

    def contradictions(self) -> Iterator[str]:
        yield from self._of_program()
        yield from self._of_image()
        yield from self._of_launcher()
        yield from self._of_places()
        if self.data.streaming or self.data.mix:
            yield from self._of_datasets()
        if self.train:
            yield from self._of_training(self.train)

    def _of_program(self) -> Iterator[str]:
        missing = [f"[{name}]" for name in ("batch", "train") if getattr(self, name) is None]
        if self.scale == "tiny" and not self.tiny:
            yield "scale = tiny: the recipe has no table [tiny] with settings for it"
        if self.command is None and missing:
            yield f"missing: expected {' and '.join(missing)}, or [command] argv"
        if self.command and len(missing) < 2:
            yield "[batch] and [train] are for dray's own trainer, which [command] replaces"
        if self.command and PurePosixPath(self.command.folder) == PurePosixPath("/"):
            yield "command.folder is /, which would hide the image's own files; name the program's folder"
        for name in (*self.env, *self.pass_env):
            if name in _OURS or name.startswith(("SLURM_", "DRAY_")):
                yield f"{name}: the scheduler or the launcher sets this; leave it out of env and pass_env"
        for name in self.env:
            if name in self.pass_env:
                yield f"{name}: in env and in pass_env; leave it out of one"
        if shown := [name for name, value in self.env.items() if secrets.is_variable(name, value)]:
            yield (
                f"env: {', '.join(shown)}: this looks like a secret, and every run folder holds its recipe; set it "
                "where you submit and name it in pass_env"
            )
        if self.min_nodes > self.nodes:
            yield f"min_nodes = {self.min_nodes}: expected at most nodes, which is {self.nodes}"

    def _of_image(self) -> Iterator[str]:
        if self.gpus == "none" and self.image != "cpu":
            yield f'gpus = "none" is for image = "cpu", but the image is {self.image}; leave one out'
        if self.layer_digest and not self.layer:
            yield "layer_digest pins a layer, but the recipe has none; set layer"
        if self.layer is not None and not _LAYER.fullmatch(self.layer):
            yield f"layer = {self.layer!a}: expected a name such as rl, or a file that ends in .sif"
        if self.layer and self.adopted:
            yield "layer works with dray's own images, not with adopted; leave one out"
        if self.has_analog and self.image in ("cuda12", "rocm", "rocm6"):
            yield f"[analog] needs the cpu or the cuda image; aihwkit-lightning does not support {self.image}"

    def _of_launcher(self) -> Iterator[str]:
        if self.launcher == "ray" and (self.train or self.ranks_per_node):
            key = "ranks_per_node" if self.ranks_per_node else "[train]"
            yield f"launcher = ray starts [command] on the first node, and does not support {key}"
        if self.accelerate and self.train:
            yield "accelerate configures a script of yours; dray's trainer is configured in [train]"
        if self.launcher == "accelerate":
            return
        if self.accelerate:
            yield f"accelerate names a file for that launcher, but the launcher is {self.launcher}"
        for name in ("strategy", "precision", "deepspeed"):
            if getattr(self.command, name, None):
                yield f"command.{name}: accelerate passes this to a script, but the launcher is {self.launcher}"

    def _of_places(self) -> Iterator[str]:
        for key, name in self.datasets().items():
            if name.startswith("hub:") and not _HUB.fullmatch(name):
                yield f"{key} = {name}: expected hub:OWNER/NAME[@REVISION][/SUBSET][:SPLIT[+SPLIT]]"
            if wrong := dataset.trouble(name):
                raise (SecretError if dataset.shows_secret(name) else ValueError)(f"{key}: {wrong}")
        if wrong := dataset.kwargs_trouble(self.datasets().values(), self.data.config_kwargs):
            yield wrong
        for key, place in self.all_places().items():
            if _SHELLS.match(place) or "*" in str(PurePosixPath(place).parent):
                yield (
                    f"{key} = {place}: dray does not expand ~ and $; * may be in a file's "
                    "name alone (a folder is searched whole)"
                )

    def _of_datasets(self) -> Iterator[str]:
        """Streams and mixes."""
        steps = self.train.steps if self.train else None
        if self.data.mix and self.train and not steps:
            yield "[data.mix] needs train.steps, not train.epochs: each source has its own epochs"
        for name in self.data.mix:
            if name in self.evaluate:
                yield f"data.mix.{name} and evaluate.{name}: metrics have one eval-{name}; rename one of them"
            if name in ("eval", "test"):
                yield f"data.mix.{name}: metrics have another dataset of this name; rename it"
        if self.data.streaming and not steps:
            yield "data.streaming: the length of a stream is unknown; set train.steps, not train.epochs"
        if self.data.streaming and not self.data.validation:
            yield "data.streaming needs data.validation: a stream has no last documents to evaluate"
        if self.data.streaming and self.data.train == "builtin":
            yield "data.streaming needs data.train: the built-in dataset is not a stream"

    def _of_training(self, train: Train) -> Iterator[str]:
        sharding = STRATEGIES[train.strategy]
        if self.has_analog and not sharding.analog:
            others = ", ".join(name for name, other in STRATEGIES.items() if other.analog)
            yield f"[analog] needs {others}; train.strategy is {train.strategy}"
        if self.has_analog and self.has_lora:
            yield "[analog] and [lora] both replace layers of the model; leave one out"
        if self.has_lora and not sharding.mixed_dtypes and self.model.dtype != "fp32":
            yield f'[lora] with train.strategy = "{train.strategy}" wants model.dtype = "fp32", not {self.model.dtype}'
        if self.data.answer_column and train.objective != "sft":
            yield f'data.answer_column is for train.objective = "sft", but it is {train.objective}'
        yield from self._of_length(train)
        if train.precision.startswith("fp8") and (sharding.deepspeed or self.has_analog or self.has_lora):
            yield f"train.precision = {train.precision} needs ddp or fsdp, without [analog] and [lora]"
        if self.has_analog and train.ema_decay:
            yield "train.ema_decay averages weights before [analog] clips them; set train.ema_decay=0"
        masked = train.objective == "masked"
        if self.data.packing != "wrapped" and masked:
            yield (
                f"data.packing = {self.data.packing} fills samples up, and a masked model would attend to the padding; "
                "set data.packing=wrapped"
            )
        for name, evaluation in self.evaluate.items():
            if evaluation.stride >= self.data.sequence_length:
                yield f"evaluate.{name}.stride = {evaluation.stride} must be less than data.sequence_length"
            if masked and (evaluation.stride or evaluation.last_word):
                yield f"evaluate.{name}: stride and last_word are for models that predict the next token"

    def _of_length(self, train: Train) -> Iterator[str]:
        length = self.data.sequence_length
        if train.sequence_length_warmup and self.data.document_mask:
            yield "train.sequence_length_warmup cuts documents; set data.document_mask=false"
        untils = [until for until, _ in train.sequence_length_warmup]
        if untils != sorted(set(untils)):
            fix = [[*pair] for pair in sorted(dict(train.sequence_length_warmup).items())]
            shown = f"train.sequence_length_warmup: expected pairs whose first numbers increase, found {untils}"
            yield f"{shown}; set train.sequence_length_warmup={fix}"
        for _, first in train.sequence_length_warmup:
            if length % first:
                yield f"train.sequence_length_warmup: {first} must divide data.sequence_length"
        if train.precision.startswith("fp8") and length % 16:
            yield f"train.precision = {train.precision} needs a data.sequence_length that is divisible by 16"
