"""The plan as data. The runner, the checks and the trainer read it as plan.json."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from dray.config.recipe import Preflight, Recipe
from dray.config.site import Fabric
from dray.config.training import Batch
from dray.contract import findings
from dray.facts import Engine, Layer

T = TypeVar("T")
Identity = Literal["node", "nodes", "name", "cpus", "image"]


def _as_object(finding: findings.Finding) -> dict[str, Any]:
    return {name: value for name, value in finding._asdict().items() if value not in ("", None)}


Finding = Annotated[
    findings.Finding,
    BeforeValidator(lambda found: findings.Finding(**found) if isinstance(found, dict) else found),
    PlainSerializer(_as_object),
]


class Choice(NamedTuple, Generic[T]):
    """What was chosen automatically, and why."""

    value: T
    why: str


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Node(_Model):
    """A node as the others reach it."""

    name: str
    """The node's name in Slurm, or in the hostfile."""
    address: str
    """The name or the address at which the others reach it."""


class World(_Model):
    """The nodes and ranks of a run, and where the rendezvous is."""

    nodes: tuple[Node, ...]
    """The nodes that take part, in the order of their numbers."""
    ranks_per_node: int
    """How many ranks each node starts."""
    size: int
    """The world size: ranks of all nodes together."""
    master: str
    """The name or the address of the first node, which holds the rendezvous."""
    port: int
    """The port of the rendezvous; 0 where the first node chooses a free one and writes it to rendezvous.json."""
    interfaces: tuple[str, ...]
    """The site's network interfaces, on one of which the first node listens; empty: the route decides."""
    rendezvous_timeout_s: int
    """Seconds that a node waits for the others in the rendezvous."""
    max_restarts: int
    """How often the runners may start all ranks again within the job."""
    spares: tuple[str, ...]
    """Spare nodes of the job, which take no part until a node fails."""
    cores: tuple[str, ...]
    """The cores of each local rank, from the site's CPU map; empty: each node divides its own cores."""
    one_machine: bool
    """Whether all nodes are this machine."""
    shared_folder: bool
    """Whether all nodes see the run folder at the same place."""
    identity: dict[Identity, str]
    """The variables in which a node finds its number, the number of nodes, its name, its cores and its image."""
    task: tuple[str, ...]
    """The variables of Slurm's task on a node that its ranks see too; none without Slurm."""


class Variable(_Model):
    """A variable of the ranks, and the values that it replaced."""

    name: str
    """The variable's name."""
    value: str
    """The value that the ranks see."""
    source: str
    """Who set it: dray, the site or the recipe."""
    why: str = ""
    """Why it has this value."""
    beats: tuple[str, ...] = ()
    """The values that it replaced, each with its source."""


class Bind(_Model):
    """One folder or file of the host, seen at the same place inside."""

    path: str
    """The path on the host, and the same in the container."""
    write: bool
    """Whether the ranks may write there."""
    source: str
    """Who asks for it: dray, the site, or a key of the recipe."""
    why: str
    """What it is for."""
    required: bool = True
    """Whether a node without it is unfit; else the node goes on without the bind."""
    made: bool = False
    """Whether the node creates the folder if it is missing."""

    @property
    def origin(self) -> str:
        """Who asks for it, and why."""
        return f"{self.source}: {self.why}"


class Plan(_Model):
    """One attempt at a run, ready to be rendered and started."""

    version: Literal[1] = 1
    """The version of the plan's format; a dray with another one refuses the plan."""
    dray: str
    """The version of dray that planned it."""
    run: str
    """The run's name, and its folder's."""
    run_folder: str
    """The folder of all attempts at the run."""
    attempt: int
    """The number of this attempt; the first is 1."""
    job: int = 0
    """Slurm's job number; 0 without Slurm."""
    folder: str
    """The folder of this attempt; the checkpoints of all attempts are in the run folder."""
    scratch: str
    """A node's own folder for temporary files and compiled code, deleted when the node has ended. Nobody can guess its
    name, and only this user may read it."""
    engine: Engine
    """What starts the container."""
    image: str
    """The image's file or reference; for bare, the Python that has the training stack."""
    image_sha256: str
    """SHA-256 of the image's file, from its record; empty if unknown."""
    image_file: str = ""
    """Owner, inode, size and time of an adopted image's file, which must be the same on each node."""
    layer: Layer | None = None
    """The user's own packages, bound beside the image."""
    signers: tuple[str, ...]
    """Fingerprints of keys, one of which must have signed the image and the layer; empty: none has to sign."""
    stage: str
    """The copy of the image on each node's own disk, made by sbcast; empty if nodes read the shared file."""
    variant: str
    """The variant of the image: cpu, cuda, cuda12, rocm or rocm6."""
    site: str
    """The site, as `site NAME`."""
    sbatch: tuple[str, ...]
    """Options that the site gives to sbatch."""
    grace_s: int
    """Seconds before the time limit at which Slurm signals the job."""
    fabric: Fabric
    annotations: dict[str, str]
    """Annotations for the engine's own hooks, by name."""
    preflight: Preflight | None
    user: str
    """The user's and the group's number, as `UID:GID`."""
    world: World
    batch: Batch | None
    launcher: tuple[str, ...]
    """The command that starts the ranks of a node; `{master}` and the like are filled in after the rendezvous."""
    command: tuple[str, ...]
    """The program that each rank runs, with its arguments."""
    where: str
    """The working directory of the ranks."""
    files: dict[str, str]
    """Files that the launcher reads, each with its content, by their names in the attempt's folder."""
    env: tuple[Variable, ...]
    """The environment variables of each rank."""
    pass_env: tuple[str, ...]
    """Names of variables that the ranks take from the job; their values are in no file."""
    left_outside: tuple[str, ...]
    """Names of the job's variables that the container does not get."""
    binds: tuple[Bind, ...]
    """The folders and files of the host that the container sees."""
    reasons: dict[str, str]
    """Why each automatic choice was made, by the name of the choice."""
    findings: tuple[Finding, ...] = ()
    """What is wrong or unwise: problem, wanted, found, where, fix; one with a code refuses the run."""
    recipe: Recipe

    @property
    def by_slurm(self) -> bool:
        """Whether Slurm starts the nodes."""
        return bool(self.world.task)

    def refuse(self) -> None:
        """Raise the first finding that refuses the run, if there is one."""
        for finding in self.findings:
            if finding.code:
                raise findings.error(finding)
