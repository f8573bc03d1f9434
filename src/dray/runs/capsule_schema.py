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
    """A file of the attempt's folder, as it was recorded."""

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
    """Its file or reference; for bare, the Python that has the training stack."""
    sha256: str
    """Of the file, as its record has it; empty where nobody knows it."""
    inputs: str = ""
    """Digest of all that the image was built from, its lock with it."""
    layer: str = ""
    """Digest of the layer's file; empty where there is none."""
    packages: dict[str, str] = {}
    """Versions of what Python had on the first node: the lock, as it came to be."""
    packages_sha256: str = ""
    """Of these packages, `name==version` a line."""


class Node(_Model):
    """A node, as its runner saw it."""

    node: Annotated[int, Field(ge=0)]
    """The node's number in the run, from 0."""
    name: str
    """Its name in Slurm or in the hostfile."""
    host: str = ""
    """Its own host name."""
    cpu: str = ""
    """The processor's model."""
    cpus: int = 0
    """Logical processors of the machine."""
    usable_cpus: str = ""
    """Those of them that the run might use."""
    cores_of_ranks: str = ""
    """To which each rank was bound; empty where none was."""
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
    """Of the machine, by their makers' names."""
    driver: str = ""
    """Version of the GPUs' kernel module."""


class Capsule(_Model):
    """One attempt at a run."""

    version: Literal[1] = 1
    """Of the capsule's form; `dray` reads only this one."""
    dray: str
    """The version of dray that planned the attempt."""
    run: str
    """The run's name."""
    attempt: Annotated[int, Field(ge=1)]
    """The number of the attempt; the first is 1."""
    job: int = 0
    """Slurm's number; 0 without Slurm."""
    planned: str
    """When it was planned."""
    finished: str | None = None
    """When its result was written; null until then."""
    status: str | None = None
    """As in result.json."""
    site: Annotated[str, Field(pattern=NAME)]
    """The name of the site, and never its file."""
    world_size: int
    """How many ranks all nodes start together."""
    image: Image
    source: Source | None = None
    """The user's own code; null where git does not know the folder of the command or the recipe."""
    torch: str = ""
    """Version of torch, as the trainer saw it."""
    nodes: tuple[Node, ...] = ()
    """The nodes that took part, by number."""
    data: dict[str, str] = {}
    """Of each dataset the SHA-256 of its tokens; of a stream, what tells it from another."""
    preflight: str | None = None
    """What the nodes proved before the launch, in a line."""
    attempts: tuple[Attempt, ...] = ()
    """All attempts up to this one."""
    files: tuple[File, ...]
    """What belongs to it, the plan first."""

    @property
    def plan(self) -> File:
        """The plan's file."""
        return self.files[0]
