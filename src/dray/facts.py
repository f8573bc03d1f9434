"""Probe results: data that is passed on and never looked up again."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dray import engines
from dray.config.model import explained
from dray.contract.findings import ConfigError, Finding, counted
from dray.hostlist import expand

_VARIABLE, _SHELL, _PATH = "variable.", "shell.", "path."
_SHOWN = 3  # names that a node list has more than once
# Variables that libraries of this field read; a container gets none by itself.
_LIBRARIES = re.compile(
    "(NCCL|RCCL|FI|UCX|GLOO|HSA|HIP|ROCR|CUDA|MIOPEN|OMP|KMP|MKL|TORCH|PYTORCH|TRITON|HF|WANDB|DS|ACCELERATE)_"
)
Engine = Annotated[str, AfterValidator(lambda name: engines.get(name).name)]


class Facts(BaseModel):
    """One probe's result. As text it is a `key=value` line each, which bash can write without quoting."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    scheduler: Literal["slurm", "local", "hosts"]
    """Who started the nodes, and so which variables tell a node who it is."""
    job: Annotated[int, Field(ge=0)] = 0
    """Slurm's job number."""
    task: Annotated[str, Field(pattern=r"^([0-9]{1,18}_[0-9]{1,18})?$")] = ""
    """What Slurm calls the job where it is a task of an array, such as 12_3; the last task's number is the array's."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often Slurm has requeued it."""
    nodelist: Annotated[str, Field(min_length=1)]
    """The nodes in Slurm's compressed form; the first is the master."""
    nodes: Annotated[int, Field(ge=1)]
    """How many nodes the scheduler says there are."""
    lost: tuple[str, ...] = ()
    """Nodes of this job that have failed before, and that take no part any more."""
    spares: tuple[str, ...] = ()
    """Nodes of this job that take no part as long as the others do."""
    missing: Annotated[int, Field(ge=0)] = 0
    """How many nodes fewer take part than at first, since others have failed and none was spare."""
    address: str | None = None
    """Address of every node, where the names do not resolve (loopback)."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs that the scheduler gave on a node."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The first node's port, where nodes share no folder in which it could tell the one it has."""
    engine: Engine
    """What starts the container."""
    image: str
    """The image's file or reference; for bare, the Python that has the training stack."""
    image_given: bool = False
    """Whether the user named the image; else the batch script guessed the variant."""
    image_variant: str = ""
    """The variant of that image, where it is known."""
    adopted: str = ""
    """Of an image that somebody else made, the folder with packages that it lacks."""
    adopted_from: str = ""
    """The file that it was made of, or the address."""
    adopted_source: str = ""
    """The folder with dray itself, the checkout's src."""
    adopted_path: str = ""
    """PYTHONPATH in that image: both folders, and what the image itself has there."""
    adopted_lacks: str = ""
    """The launchers that it has not: of accelerate, deepspeed and ray."""
    image_file: str = ""
    """How the adopted image's file is known again: owner, inode, size and time."""
    image_sha256: str = ""
    """The image's digest, where its record beside it tells."""
    layer: str = ""
    """The file of the recipe's layer, once a job's planner has asked to see it."""
    image_digest: str = ""
    """The digest of the file's bytes, which takes seconds: only where the recipe pins one."""
    site: str = ""
    """The cluster's profile, by name or file; empty: what Slurm calls the cluster decides."""
    cluster: str = ""
    """What Slurm calls this cluster."""
    login: str = ""
    """The machine on which nothing but the plan was made, whose name a site file may know."""
    account: str = ""
    """Whose project sbatch is told to charge."""
    options: tuple[str, ...] = ()
    """What the user adds to sbatch."""
    preempt_mode: str = ""
    """PreemptMode of the job's partition; empty where nobody has told it."""
    preempt_signal: bool = False
    """Whether preemption sends the job's own --signal (PreemptParameters=send_user_signal)."""
    preempt_grace_s: Annotated[int, Field(ge=0)] | None = None
    """GraceTime of that partition: from SIGTERM to the job's end."""
    kill_wait_s: Annotated[int, Field(ge=0)] | None = None
    """KillWait: from a job's end to SIGKILL."""
    gpu_memory_gb: float | None = None
    """Memory of one GPU, in place of the site's; 0: any model fits."""
    home: str = ""
    """The user's home, which no container sees by accident."""
    variables: dict[str, str] = {}
    """The job's values of the variables that site files name in paths."""
    paths: dict[str, Literal["there", "absent"]] = {}
    """Which of the folders that the site names are on the job's first node."""
    hf_home: str | None = None
    """HF_HOME as the job has it; else the library's own place for it in the home, if that is there."""
    environment: tuple[str, ...] = ()
    """Names of the job's variables that libraries of this field read; none enters a container by itself."""
    uid: int = 0
    gid: int = 0
    shell: Annotated[dict[str, str], Field(exclude=True, repr=False)] = {}
    """The environment in which the run was started. It may hold secrets, and is never written down.

    A job's probe tells the values of libraries' variables alone."""

    def hosts(self) -> list[str]:
        """The nodes by name; each is named once, and their number must be what the scheduler says."""
        hosts = expand(self.nodelist)
        if len(named := Counter(hosts)) < len(hosts):
            again = [f"{name} ({count} times)" for name, count in named.items() if count > 1]
            shown = ", ".join(again[:_SHOWN]) + ", ..." * bool(again[_SHOWN:])
            raise ConfigError(
                "the node list names a node more than once",
                wanted=f"each node once, as SLURM_JOB_NODELIST has it: {counted(len(named), 'name')}",
                found=f"{shown} among {counted(len(hosts), 'name')}",
                fix="submit again; if it stays, SLURM_JOB_NODELIST was changed by hand",
            )
        if len(hosts) != self.nodes:
            raise ConfigError(
                "the node list and the node count do not agree",
                wanted=counted(self.nodes, "node"),
                found=f"{len(hosts)} in {self.nodelist}",
                fix="submit again; if it stays, SLURM_JOB_NODELIST or SLURM_JOB_NUM_NODES was changed by hand",
            )
        return hosts


class Counted(BaseModel):
    """Of a model without memory behind it: its weights, and the bytes of a row that its forward pass keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kept: int
    """Of a step as it is."""
    checkpointed: int
    """With activation checkpointing."""
    parameters: int
    """Numbers in all weights; one that two layers share counts once."""
    outside: int
    """Those of them in no layer of the stack, such as the embedding's."""
    trained: int
    """Those that the optimizer moves: with LoRA the adapters' alone."""


class Layer(BaseModel):
    """Packages of the user's own, in a SIF that is bound beside the image."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    file: str
    """The SIF."""
    digest: str
    """The SHA-256 of its bytes."""
    variant: str
    """The image that it was made for."""
    packages: dict[str, str]
    """What it adds, with versions."""
    changed: tuple[str, ...] = ()
    """The packages of the image that are others than those that it was locked for."""


class Files(BaseModel):
    """What this machine's disk holds of what the recipe names, looked up once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    configuration: dict[str, Any] | None = None
    """The model's config.json, as transformers will read it; none where it is not on this disk."""
    counted: Counted | None = None
    """What the model keeps, where somebody has counted it."""
    layer: Layer | None = None
    """The recipe's layer, where an engine binds it."""
    missing_on_hub: tuple[str, ...] = ()
    """Models and datasets of the hub that are not in its cache."""
    save_s: float | None = None
    """Seconds that the slowest checkpoint of an earlier run took."""
    save_run: str = ""
    """Which run that was."""
    earlier: bool = False
    """Whether a run of this recipe is there already, with which the notes came that are the same each time."""
    findings: tuple[Finding, ...] = ()
    """What it shows to fail: a program that is not there, a type of model that transformers does not have."""
    missing_paths: dict[str, str] = {}
    """The recipe's keys of files that are not on this machine, and the files."""


_LISTS = ("environment", "lost", "spares")


def parse(text: str, *, where: str) -> Facts:
    """Facts from a probe's `key=value` lines. A value runs to the end of its line."""
    found: dict[str, str | list[str] | dict[str, str]] = {}
    variables: dict[str, str] = {}
    shell: dict[str, str] = {}
    paths: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        key, separator, value = line.partition("=")
        if not separator:
            raise ConfigError(
                "a line of the facts is not key=value", where=f"{where}, line {number}", found=ascii(line[:60])
            )
        if key.startswith(_VARIABLE):
            variables[key.removeprefix(_VARIABLE)] = value
        elif key.startswith(_SHELL):
            shell[key.removeprefix(_SHELL)] = value
        elif key.startswith(_PATH):
            paths[key.removeprefix(_PATH)] = value
        elif value:
            found[key] = value.split() if key in _LISTS else value
    found |= {"variables": variables, "shell": shell, "paths": paths}
    found.setdefault("environment", sorted(name for name in shell if _LIBRARIES.match(name)))
    try:
        return Facts.model_validate(found)
    except ValidationError as wrong:
        raise ConfigError(
            "the facts are not usable",
            where=where,
            found=explained(wrong),
            fix="slurm/probe.sh writes them, and is to be of the image's version of dray; a file of your own needs the "
            "same keys",
        ) from wrong


def to_text(facts: Facts) -> str:
    """The `key=value` lines that `parse` reads."""
    found = facts.model_dump(exclude_none=True, exclude={"variables", "options", "paths"})
    found |= {name: " ".join(found[name]) for name in _LISTS}
    found |= {f"{_VARIABLE}{name}": value for name, value in facts.variables.items()}
    found |= {f"{_PATH}{path}": state for path, state in facts.paths.items()}
    return "".join(
        f"{key}={int(value) if value is True else value}\n" for key, value in found.items() if value is not False
    )
