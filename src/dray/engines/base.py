"""What an engine is: how it starts one container on a node, and the traits by which the rest of dray treats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple


class Shell(str):
    """An argument that only the node knows, as its own shell expands it; every other argument is quoted."""

    __slots__ = ()


MOUNTS, DEVICES, STAGED_IMAGE = Shell('"${mounts[@]}"'), Shell('"${devices[@]}"'), Shell('"$image"')
"""What node.sh has filled before the engine starts."""


LAYER = "/opt/layer"
"""Where the image's Python and PATH look for packages of the user's own."""


class Mount(NamedTuple):
    """A folder or file of the host at the same path in the container."""

    path: str
    write: bool


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container of one node."""

    run: str
    image: str
    staged: bool
    """Whether the node starts a copy of the image on its own disk."""
    accelerator: str
    annotations: dict[str, str] = field(default_factory=dict)
    """What the engine's hooks are told."""
    fabric: str = ""
    """The fabric between its nodes, where the engine itself brings the host's libraries for it."""
    layer: str = ""
    """The SIF with the user's own packages, if any."""
    folder: str
    """The working directory."""
    user: str
    variables: tuple[str, ...]
    """The names of the variables that are set inside."""
    name_variable: str
    """The variable with the node's name."""
    home: bool = False
    """Whether the user's home is inside, where the engine's own configuration binds it."""
    one_machine: bool
    """Whether all nodes of the run are containers on this machine."""
    terminal: bool = False
    """Whether a user's terminal may be at its streams."""
    mounts: tuple[Mount, ...]
    """What each node has; what only some have, the node's own script adds."""


class Engine:
    """Starts containers. A new one is a subclass in a file of its own, registered in `dray.engines`."""

    name: ClassVar[str]
    image: ClassVar[Literal["file", "store", "python"]] = "file"
    """Where an image is: a file that nodes read, the engine's own store, or none: an installed Python."""
    formats: ClassVar[tuple[str, ...]] = ("sif", "squashfs")
    """The kinds of image that it starts from a file, the usual one first; `folder` is a file system's tree."""
    store_prefix: ClassVar[str] = ""
    """What the store adds in front of a name that no registry has."""
    reference: ClassVar[str] = ""
    """What the name of an image must match, where the store has those of registries alone, and so no usual one."""
    schedulers: ClassVar[frozenset[str]] = frozenset({"slurm", "hosts", "local"})
    """Who starts the nodes that it can be used on."""
    isolates_env: ClassVar[bool] = True
    """Whether only the variables that the plan names reach the ranks."""
    env_prefix: ClassVar[str] = ""
    """What makes the engine hand in a variable, in front of its name."""
    script_mounts: ClassVar[bool] = True
    """Whether node.sh looks for what must be mounted and lists it."""
    script: ClassVar[str] = "mount"
    """The file of bash whose `node::option PATH ro|rw` adds a mount to the list."""
    read_only: ClassVar[str] = "ro"
    """The option of a mount that nobody may write."""
    unmountable: ClassVar[str] = ""
    """The characters that no path of a mount may have, since they separate the mounts or begin a variable."""
    host_libraries: ClassVar[bool] = False
    """Whether it puts libraries of the host into the container's library path."""
    names_devices: ClassVar[bool] = False
    """Whether each device of the host must be named."""
    gpu_access: ClassVar[dict[str, str]] = {}
    """How the container sees GPUs of a kind, where that needs a reason."""
    devices: ClassVar[dict[str, str]] = {}
    """For images of this kind: the file of bash whose `node::FILE ENGINE KIND NAME...` fills `devices` with options."""
    fabric: ClassVar[dict[tuple[str, str], str]] = {}
    """How it brings the host's libraries for a kind of fabric and a variant, in place of those that the site names."""
    takes_annotations: ClassVar[bool] = False
    """Whether it has hooks that annotations turn on."""
    binds_layers: ClassVar[bool] = False
    """Whether it binds what a SIF holds into a container of another image."""
    verifies: ClassVar[bool] = False
    """Whether `NAME verify` checks who signed an image before it starts."""
    private_network: ClassVar[bool] = False
    """Whether nodes on one machine have a network of their own, and containers outlive the program that starts them."""

    def python(self, _image: str) -> str:
        """The Python inside."""
        return "python3"

    def argv(self, container: Container, inner: Sequence[str]) -> list[str]:
        """The command line that runs `inner` in a container in the foreground."""
        raise NotImplementedError

    def identify(self, _image: str) -> list[str]:
        """The program that prints which image a node has; nothing where there is none."""
        return []

    def annotations(self, _variant: str, _fabric: str, _site: Mapping[str, str]) -> dict[str, str]:
        """What its hooks are told for this variant of the image, on this fabric if any, and by the site."""
        return {}

    def srun_options(self, _container: Container) -> list[str]:
        """What srun is told, where Slurm itself starts the container."""
        return []

    def files(self, _container: Container) -> dict[str, str]:
        """What is written for it into the attempt's folder."""
        return {}
