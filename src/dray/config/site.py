"""A site: what a cluster offers and requires, as data, each value with its reason and source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dray import engines
from dray.config.image_definition import PLUGIN, Fingerprint, Variant
from dray.config.load_toml import Natural, NotNegative, Spec, Variable
from dray.contract import secrets
from dray.contract.ranges import parse

NAME = r"^[a-z0-9][a-z0-9_-]*$"
"""Without a dot: what ends in .toml is a file."""
Cores = Annotated[str, Field(pattern=r"^[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*$")]
# Variables of the job are allowed: $SCRATCH/data.
BindPath = Annotated[str, Field(pattern=r"^(/|\$[A-Za-z_])[^\n\"]*$")]
# A site's file may break a sentence over lines; node.sh has it in a comment.
Sentence = Annotated[str, AfterValidator(lambda text: " ".join(text.split()))]
Pattern = Annotated[str, Field(pattern=r"^/[^\n\"$,]*$")]
Annotation = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+$")]


def _flat(table: object) -> object:
    """Dotted keys, which TOML reads as tables in tables, as an EDF has them."""
    if not isinstance(table, dict):
        return table
    flat: dict[str, object] = {}
    for name, value in table.items():
        below = _flat(value)
        flat |= {f"{name}.{rest}": one for rest, one in below.items()} if isinstance(below, dict) else {name: value}
    return flat


class SiteBind(Spec):
    """A folder or file of the host that the container sees at the same path."""

    path: BindPath
    """Absolute path; it may name variables of the job, such as $SCRATCH."""
    why: Sentence
    """What fails without it."""
    source: str = ""
    """Which page or script this is from."""
    write: bool = False
    """Whether ranks may write there."""
    required: bool = True
    """Whether a node without it is unfit; if false, such a node runs without the bind."""

    def variables(self) -> list[str]:
        """The variables of the job in the path."""
        return re.findall(r"\$(\w+)", self.path)

    def contradictions(self) -> Iterator[str]:
        for name in self.variables():
            if secrets.is_name(name):
                yield f"${name} looks like a secret, and plans show the paths of binds"


class SiteVariable(Spec):
    """One environment variable that this cluster needs."""

    name: Variable
    """Its name."""
    value: str
    """Its value."""
    why: Sentence
    """What fails without it."""
    source: str = ""
    """Which page or script this is from."""
    nodes: Literal["any", "one", "several"] = "any"
    """Set it in all jobs, only in jobs of one node, or only in jobs of several."""

    def contradictions(self) -> Iterator[str]:
        if secrets.is_variable(self.name, self.value):
            yield f"{self.name} looks like a secret, and all users read a site file; name it in pass_env"


class Fabric(Spec):
    """The network between nodes, and the proof that a run uses it."""

    kind: Literal["unknown", "slingshot", "infiniband", "ethernet"] = "unknown"
    """Its hardware."""
    strategy: Literal["host", "image", "none"] = "none"
    """Whose libraries drive it: the host's, bound into the container; the image's; or none are needed."""
    libraries: tuple[Pattern, ...] = ()
    """With `host`: the host's files to bind into the container's library path. A * selects the newest match."""
    plugin: Annotated[str, Field(pattern=r"^(image|/[^\n\"$,]*)?$")] = ""
    """NCCL's or RCCL's network plugin: its full path, in which a * selects the newest match; or `image`: the one for
    libfabric in dray's images, which drives the host's libfabric."""
    transport: tuple[str, ...] = ()
    """The transports that NCCL or RCCL may use between nodes, such as cxi or IB. dray ends a run with another one."""
    min_bus_bandwidth_gb_s: NotNegative = 0.0
    """Minimum bus bandwidth of an all-reduce over two to eight nodes, in GB/s; 0: no minimum."""

    def contradictions(self) -> Iterator[str]:
        if self.strategy != "host" and self.libraries:
            yield 'fabric.libraries needs strategy = "host"'
        if self.strategy == "host" and not (self.libraries or self.plugin):
            yield 'strategy = "host" needs fabric.libraries or fabric.plugin'
        if self.plugin and self.strategy == "none":
            yield 'fabric.plugin needs strategy = "host" or "image"'

    @property
    def files(self) -> tuple[str, ...]:
        """The patterns of the host's files that go into the container."""
        return (*self.libraries, *filter(None, [self.host_plugin]))

    @property
    def host_plugin(self) -> str:
        """The plugin's pattern, if it is the host's."""
        return self.plugin if self.strategy == "host" and self.plugin != "image" else ""

    @property
    def image_plugin(self) -> str:
        """The plugin's path in the image, if it is the image's."""
        return PLUGIN if self.plugin == "image" else self.plugin if self.strategy == "image" else ""


class Site(Spec):
    """The profile of one cluster."""

    lists = "dray site keys"
    name: Annotated[str, Field(pattern=NAME)]
    """The name of the file, without .toml."""
    about: str
    """The machine in one sentence."""
    clusters: tuple[str, ...] = ()
    """The cluster's names in Slurm (SLURM_CLUSTER_NAME), by which dray selects this site."""
    hosts: tuple[str, ...] = ()
    """Patterns of host names, such as iris-*, if the name in Slurm is not enough."""
    image: Variant | None = None
    """The image variant for its GPUs."""
    image_signers: tuple[Fingerprint, ...] = ()
    """Fingerprints of keys, one of which must have signed each SIF that starts here."""
    gpus_per_node: Natural = 0
    """GPUs of a node; the default of --gpus-per-node."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How a job requests GPUs: --gpus-per-node=N or --gres=gpu:N."""
    gpu_memory_gb: NotNegative = 0.0
    """Memory of one GPU, the smaller one if there are two kinds. dray refuses a run that does not fit."""
    bf16: bool = True
    """Whether its GPUs multiply bf16 in hardware; those before A100 (V100) emulate it, without tensor cores. If false,
    a recipe without train.precision trains in fp16, and one with bf16 is refused."""
    account: str = ""
    """An example of an account, if the cluster requires --account; `dray submit` refuses a job without one."""
    cpus_per_node: Natural = 0
    """Logical CPUs of a node."""
    sbatch: tuple[str, ...] = ()
    """Options that `dray submit` adds to sbatch, such as `--partition=gpu`."""
    grace_s: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Seconds before the time limit at which `dray submit` has Slurm ask a run to save and end; 0: the scripts' 120."""
    binds: tuple[SiteBind, ...] = ()
    """Folders that ranks need."""
    env: tuple[SiteVariable, ...] = ()
    """Variables that ranks need."""
    interfaces: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,15}$")], ...] = ()
    """Interfaces for the rendezvous, in order of preference. Default: the address of the first node's host name."""
    engine: Literal["", "pyxis", "edf", "podman-hpc"] = ""
    """The container engine, if it is not apptainer or singularity (docs/reference/engines.md)."""
    annotations: Annotated[dict[Annotation, str], BeforeValidator(_flat)] = {}
    """With `edf`: annotations for the Container Engine's hooks, such as com.hooks.netstack.source = "artifact". They
    override dray's own."""
    stage: Annotated[str, Field(pattern=r"^(off|/.+)$")] = "off"
    """A folder on each node's own disk, such as /tmp or /dev/shm, to which Slurm's sbcast copies the image before the
    start; `off`: nodes read the shared file."""
    cores: tuple[Cores, ...] = ()
    """The cores of each local rank, such as 49-55; used if the job has all of them and as many ranks on a node."""
    fabric: Fabric = Fabric()
    why: dict[str, str] = {}
    """For each key above: why it has this value, with the source. `uncertain:` begins what is not certain."""

    def variables(self) -> list[str]:
        """The names of the variables in the site's paths."""
        return sorted({name for bind in self.binds for name in bind.variables()})

    def folders(self) -> list[str]:
        """The folders that every node must have. Without those with a blank, which the batch script would split."""
        return [bind.path for bind in self.binds if bind.required and not re.search(r"[$\s]", bind.path)]

    def contradictions(self) -> Iterator[str]:
        for key in self.why:
            if key not in type(self).model_fields:
                yield f"why.{key}: there is no such key to explain"
        yield from self._of_cores()
        engine = engines.get(self.engine or "apptainer")
        if self.stage != "off" and not engine.script_mounts:
            yield f"stage: with {self.engine}, Slurm starts the image before a node could copy it"
        if self.annotations and not engine.takes_annotations:
            yield 'annotations need engine = "edf"'
        for name in self.annotations:
            if any(other.startswith(f"{name}.") for other in self.annotations):
                yield f"annotations.{name} cannot have a value and names below it"
        names = [variable.name for variable in self.env if variable.nodes == "any"]
        for name in names:
            if names.count(name) > 1:
                yield f"env: {name} is set twice"

    def _of_cores(self) -> Iterator[str]:
        taken: set[int] = set()
        for mask in self.cores:
            cores = {*parse(mask)}
            if not cores:
                yield f"{mask}: a range ends before it begins"
            if cores & taken:
                yield f"{mask}: core {min(cores & taken)} belongs to another rank"
            taken |= cores
        highest = max(taken, default=-1)
        if self.cpus_per_node and highest >= self.cpus_per_node:
            yield f"cores: core {highest} is not on a node of {self.cpus_per_node} CPUs (cpus_per_node)"
        if self.cores and self.gpus_per_node and len(self.cores) != self.gpus_per_node:
            yield f"cores: {len(self.cores)} masks for {self.gpus_per_node} GPUs (gpus_per_node)"
