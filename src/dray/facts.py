"""Probe results: data that is passed on and never looked up again."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dray import engines
from dray.config.load_toml import explained
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
    """What started the nodes, and so which variables give a node its number."""
    job: Annotated[int, Field(ge=0)] = 0
    """Slurm's job number."""
    task: Annotated[str, Field(pattern=r"^([0-9]{1,18}_[0-9]{1,18})?$")] = ""
    """For a task of a job array, Slurm's name such as 12_3; the last task has the array's own job number."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often Slurm has requeued the job."""
    nodelist: Annotated[str, Field(min_length=1)]
    """The nodes in Slurm's compressed form; the first is the master."""
    nodes: Annotated[int, Field(ge=1)]
    """How many nodes the scheduler says there are."""
    lost: tuple[str, ...] = ()
    """Nodes of this job that have failed and take no part any more."""
    spares: tuple[str, ...] = ()
    """Spare nodes of this job, which take part only after another one has failed."""
    missing: Annotated[int, Field(ge=0)] = 0
    """How many nodes have failed without a spare node to replace them."""
    address: str | None = None
    """The address of every node if their names do not resolve (loopback)."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs per node that the scheduler allocated."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The first node's port, for nodes without a shared folder in which it could publish its port."""
    engine: Engine
    """What starts the container."""
    image: str
    """The image's file or reference; for bare, the Python that has the training stack."""
    image_given: bool = False
    """Whether the user named the image; else the batch script guessed the variant."""
    image_variant: str = ""
    """The variant of that image, if it is known."""
    adopted: str = ""
    """For an adopted image, the folder with packages that the image lacks."""
    adopted_from: str = ""
    """The file or address of the adopted image."""
    adopted_source: str = ""
    """For an adopted image, the folder with dray itself: the checkout's src."""
    adopted_path: str = ""
    """PYTHONPATH in an adopted image: both folders, and the image's own entries."""
    adopted_lacks: str = ""
    """The launchers that the adopted image lacks: of accelerate, deepspeed and ray."""
    image_file: str = ""
    """What identifies the adopted image's file: owner, inode, size and time."""
    image_sha256: str = ""
    """The image's digest, if the record beside the image has it."""
    layer: str = ""
    """The file of the recipe's layer, if a job's planner has asked for it."""
    image_digest: str = ""
    """The digest of the file's bytes. It takes seconds, so only if the recipe pins a digest."""
    site: str = ""
    """The site's name or file; empty: Slurm's name of the cluster decides."""
    cluster: str = ""
    """Slurm's name of this cluster."""
    login: str = ""
    """The machine that only makes the plan, such as a login node; a site file may have its name."""
    account: str = ""
    """The account that sbatch charges."""
    options: tuple[str, ...] = ()
    """The user's own options of sbatch."""
    preempt_mode: str = ""
    """PreemptMode of the job's partition; empty if it is unknown."""
    preempt_signal: bool = False
    """Whether preemption sends the job's own --signal (PreemptParameters=send_user_signal)."""
    preempt_grace_s: Annotated[int, Field(ge=0)] | None = None
    """GraceTime of that partition: from SIGTERM to the job's end."""
    kill_wait_s: Annotated[int, Field(ge=0)] | None = None
    """KillWait: from a job's end to SIGKILL."""
    gpu_memory_gb: float | None = None
    """Memory of one GPU, which replaces the site's value; 0: any model fits."""
    home: str = ""
    """The user's home, which no container sees by accident."""
    variables: dict[str, str] = {}
    """The job's values of the variables in paths of site files."""
    paths: dict[str, Literal["there", "absent"]] = {}
    """Which of the site's folders exist on the job's first node."""
    hf_home: str | None = None
    """HF_HOME in the job; else the library's default folder in the home, if it exists."""
    environment: tuple[str, ...] = ()
    """Names of the job's variables that libraries such as NCCL read; containers get none by default."""
    uid: int = 0
    gid: int = 0
    shell: Annotated[dict[str, str], Field(exclude=True, repr=False)] = {}
    """The environment in which the run was started. It may hold secrets; dray never writes it to a file.

    A job's probe gives only the values of libraries' variables."""

    def hosts(self) -> list[str]:
        """The nodes by name; each is named once, and their number must be what the scheduler says."""
        hosts = expand(self.nodelist)
        if len(named := Counter(hosts)) < len(hosts):
            again = [f"{name} ({count} times)" for name, count in named.items() if count > 1]
            shown = ", ".join(again[:_SHOWN]) + ", ..." * bool(again[_SHOWN:])
            raise ConfigError(
                "the node list names a node more than once",
                wanted=f"each node once: {counted(len(named), 'name')}",
                found=f"{shown} among {counted(len(hosts), 'name')}",
                fix="submit again; if the error stays, something in the job has changed SLURM_JOB_NODELIST",
            )
        if len(hosts) != self.nodes:
            raise ConfigError(
                "the node list and the node count do not agree",
                wanted=counted(self.nodes, "node"),
                found=f"{len(hosts)} in {self.nodelist}",
                fix="submit again; if the error stays, something has changed SLURM_JOB_NODELIST or SLURM_JOB_NUM_NODES",
            )
        return hosts


class Layer(BaseModel):
    """Packages of the user's own, in a SIF that is bound beside the image."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    file: str
    """The SIF."""
    digest: str
    """The SHA-256 of its bytes."""
    variant: str
    """The variant of the image that it was made for."""
    packages: dict[str, str]
    """The packages that it adds, with their versions."""
    changed: tuple[str, ...] = ()
    """Packages of the image that differ from those for which the layer was locked."""


class Files(BaseModel):
    """What this machine's disk has of the files that a recipe names, looked up once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    configuration: dict[str, Any] | None = None
    """The model's config.json, as transformers will read it; None if it is not on this disk."""
    layer: Layer | None = None
    """The recipe's layer, if an engine binds it."""
    missing_on_hub: tuple[str, ...] = ()
    """Models and datasets of the hub that are missing in its cache."""
    save_s: float | None = None
    """Seconds that the slowest checkpoint of an earlier run took."""
    save_run: str = ""
    """The name of that run."""
    earlier: bool = False
    """Whether an earlier run of this recipe exists, which has already shown the notes that never change."""
    findings: tuple[Finding, ...] = ()
    """What would fail: a program that is missing."""
    missing_paths: dict[str, str] = {}
    """The recipe's keys whose files are missing on this machine, and those files."""


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
            "the facts are not valid",
            where=where,
            found=explained(wrong),
            fix="write them with slurm/probe.sh of the image's version of dray; your own file needs the same keys",
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
