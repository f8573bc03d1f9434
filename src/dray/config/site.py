"""A site: what a cluster asks for and offers, as data. Each value says why, and from where it is known."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dray.config.image import Variant
from dray.config.model import Spec

Cores = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")]
# Whole words of a path may be variables of the job: $SCRATCH/data.
Place = Annotated[str, Field(pattern=r"^(/|\$[A-Za-z_])[^\n\"]*$")]
Pattern = Annotated[str, Field(pattern=r"^/[^\n\"$,]*$")]


class SiteBind(Spec):
    """A folder or file of the host that the container sees at the same place."""

    path: Place
    """Absolute path; it may name variables of the job, such as $SCRATCH."""
    why: str
    """What breaks without it."""
    source: str = ""
    """From where this is known."""
    write: bool = False
    """Whether ranks may write there."""
    required: bool = True
    """Whether a node without it is unfit; where it is not required, it is left out there."""


class SiteVariable(Spec):
    """One environment variable that this cluster needs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Its name."""
    value: str
    """Its value."""
    why: str
    """What breaks without it."""
    source: str = ""
    """From where this is known."""
    nodes: Literal["any", "one", "several"] = "any"
    """Whether it is for jobs of one node or of several only."""


class Fabric(Spec):
    """The network between nodes, and how to tell that it is used."""

    kind: Literal["unknown", "slingshot", "infiniband", "ethernet"] = "unknown"
    """What it is."""
    strategy: Literal["host", "image", "none"] = "none"
    """Whose libraries drive it: the host's, put into the container; the image's own; or nothing is to be done."""
    libraries: tuple[Pattern, ...] = ()
    """With `host`: the host's files that go into the container's library path. A * takes the newest that matches."""
    plugin: Annotated[str, Field(pattern=r"^(/[^\n\"$,]*)?$")] = ""
    """NCCL's or RCCL's network plugin by its full path; a * takes the newest that matches."""
    transport: tuple[str, ...] = ()
    """What NCCL or RCCL may say that it uses between nodes, such as cxi or IB. Anything else is a silent fallback."""
    min_bus_bandwidth_gb_s: Annotated[float, Field(ge=0)] = 0.0
    """The least bus bandwidth of an all-reduce over two to eight nodes, GB/s; 0 sets none."""

    @model_validator(mode="after")
    def _libraries_are_the_hosts(self) -> Fabric:
        if self.strategy != "host" and self.libraries:
            raise ValueError('fabric.libraries are put into the container with strategy = "host" only')
        if self.strategy == "host" and not (self.libraries or self.plugin):
            raise ValueError('strategy = "host" wants fabric.libraries or fabric.plugin')
        return self


class Site(Spec):
    """One cluster's profile."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    """The file's own name."""
    about: str
    """Which machine this is."""
    clusters: tuple[str, ...] = ()
    """What Slurm calls it (SLURM_CLUSTER_NAME); so it is found by itself."""
    hosts: tuple[str, ...] = ()
    """Patterns of host names, such as iris-*, where the cluster's name does not tell."""
    image: Variant | None = None
    """The variant for its GPUs."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs on a node, which a job asks for where its user names no number."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How sbatch is asked for them: --gpus-per-node=N or --gres=gpu:N."""
    gpu_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    """Memory of one GPU, the smaller one where there are two kinds; `dray submit` refuses what will not fit."""
    account: str = ""
    """What its projects' accounts look like, where sbatch must be told one; `dray submit` asks for it."""
    cpus_per_node: Annotated[int, Field(ge=0)] = 0
    """Logical CPUs of a node."""
    sbatch: tuple[str, ...] = ()
    """Options that `dray submit` adds to sbatch, such as `--partition=gpu`."""
    binds: tuple[SiteBind, ...] = ()
    """Folders that ranks need."""
    env: tuple[SiteVariable, ...] = ()
    """Variables that ranks need."""
    interfaces: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,15}$")], ...] = ()
    """Network interfaces on which ranks meet, the first that the first node has; else its host name's address."""
    engine: Literal["", "pyxis"] = ""
    """What starts containers, where it is not the apptainer or singularity on the nodes."""
    stage: Annotated[str, Field(pattern=r"^(/.+)?$")] = ""
    """A folder of each node's own disk, such as /tmp or /dev/shm, to which the image is copied before it starts."""
    cores: tuple[Cores, ...] = ()
    """The cores of each local rank, such as 49-55; used where a job has all of them and as many ranks on a node."""
    fabric: Fabric = Fabric()
    why: dict[str, str] = {}
    """For a key above: why it has this value, and from where that is known. `uncertain:` begins what is not sure."""

    @field_validator("cores")
    @classmethod
    def _no_core_twice(cls, cores: tuple[str, ...]) -> tuple[str, ...]:
        seen: set[int] = set()
        for mask in cores:
            mine = set(numbers(mask))
            if not mine:
                raise ValueError(f"{mask}: a range ends before it begins")
            if mine & seen:
                raise ValueError(f"{mask}: core {min(mine & seen)} is another rank's already")
            seen |= mine
        return cores

    @model_validator(mode="after")
    def _fits_the_node(self) -> Site:
        unknown = set(self.why) - set(type(self).model_fields)
        if unknown:
            raise ValueError(f"why.{min(unknown)}: there is no such key, so there is nothing to explain")
        highest = max((max(numbers(mask)) for mask in self.cores), default=-1)
        if self.cpus_per_node and highest >= self.cpus_per_node:
            raise ValueError(f"cores: core {highest} is not on a node of {self.cpus_per_node} CPUs (cpus_per_node)")
        if self.cores and self.gpus_per_node and len(self.cores) != self.gpus_per_node:
            raise ValueError(f"cores: {len(self.cores)} masks for {self.gpus_per_node} GPUs (gpus_per_node)")
        twice = [
            one for one in {v.name for v in self.env} if [v.name for v in self.env if v.nodes == "any"].count(one) > 1
        ]
        if twice:
            raise ValueError(f"env: {min(twice)} is there twice")
        return self


def numbers(mask: str) -> list[int]:
    """0-3,8 as the kernel writes it."""
    found: list[int] = []
    for part in mask.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
