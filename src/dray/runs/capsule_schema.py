"""The capsule as data: capsule.json."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dray.config.site import NAME
from dray.runs.result import Attempt
from dray.runs.source import Source


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class File(_Model):
    """A recorded file of the attempt's folder."""

    path: str
    """The file's path in the attempt's folder."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of its bytes."""
    size: Annotated[int, Field(ge=0)]
    """Its size in bytes."""


class Image(_Model):
    """What started the run."""

    engine: str
    """What started the container."""
    variant: str
    """The variant of the image: cpu, cuda, cuda12, rocm or rocm6."""
    file: str
    """Its file or reference; for bare, the Python with the training packages."""
    sha256: str
    """SHA-256 of the file, from its record; empty if unknown."""
    inputs: str = ""
    """Digest of everything that the image was built from, including its lock."""
    layer: str = ""
    """Digest of the layer's file; empty without a layer."""
    packages: dict[str, str] = {}
    """Versions of the Python packages that the first node had."""
    packages_sha256: str = ""
    """SHA-256 of these packages, as lines of `name==version`."""


class Node(_Model):
    """A node, as its runner recorded it."""

    node: Annotated[int, Field(ge=0)]
    """The node's number in the run, from 0."""
    name: str
    """Its name in Slurm or in the hostfile."""
    host: str = ""
    """The host name that the node itself has."""
    cpu: str = ""
    """The processor's model."""
    cpus: int = 0
    """Logical processors of the machine."""
    usable_cpus: str = ""
    """The processors that the run was allowed to use."""
    cores_of_ranks: str = ""
    """The processors that each rank was bound to; empty without binding."""
    threads: int | None = None
    """OMP_NUM_THREADS of each rank."""
    numa: tuple[str, ...] = ()
    """The processors of each NUMA node."""
    memory_gb: float | None = None
    """Memory of the machine, in GB."""
    kernel: str = ""
    """Name and version of its kernel."""
    libc: str = ""
    """The C library that the runner's Python uses, with its version."""
    python: str = ""
    """Version of the runner's Python."""
    gpus: tuple[str, ...] = ()
    """Models of the machine's GPUs."""
    driver: str = ""
    """Version of the GPUs' kernel module."""


class Capsule(_Model):
    """One attempt at a run."""

    version: Literal[1] = 1
    """Version of the capsule's format; dray reads only this one."""
    dray: str
    """The version of dray that planned the attempt."""
    run: str
    """The run's name."""
    attempt: Annotated[int, Field(ge=1)]
    """The number of the attempt; the first is 1."""
    job: int = 0
    """Slurm's job number; 0 without Slurm."""
    planned: str
    """When the attempt was planned."""
    finished: str | None = None
    """When its result was written; null until then."""
    status: str | None = None
    """The attempt's status, as in result.json."""
    site: Annotated[str, Field(pattern=NAME)]
    """The name of the site, never the path of its file."""
    world_size: int
    """The number of ranks on all nodes."""
    image: Image
    source: Source | None = None
    """The user's own code; null if the folder of the command or the recipe is not in a git repository."""
    torch: str = ""
    """Version of torch, as the trainer saw it."""
    nodes: tuple[Node, ...] = ()
    """The nodes that took part, by number."""
    data: dict[str, str] = {}
    """SHA-256 of each dataset's tokens; for a stream, a text that identifies it."""
    preflight: str | None = None
    """What the nodes proved before the launch, in a line."""
    attempts: tuple[Attempt, ...] = ()
    """All attempts up to this one."""
    files: tuple[File, ...]
    """The files of the attempt, the plan first."""

    @property
    def plan(self) -> File:
        """The plan's file."""
        return self.files[0]
