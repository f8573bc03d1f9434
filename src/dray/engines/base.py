"""What an engine is: how it starts one container on a node, and the traits that the rest of dray uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple


class Shell(str):
    """An argument that the node's shell expands, since only the node knows it; every other argument is quoted."""

    __slots__ = ()


MOUNTS, DEVICES, STAGED_IMAGE = Shell('"${mounts[@]}"'), Shell('"${devices[@]}"'), Shell('"$image"')
"""Variables that node.sh has filled before the engine starts."""


LAYER = "/opt/layer"
"""The folder in which the image's Python and PATH look for a layer's packages."""


class Mount(NamedTuple):
    """A folder or file of the host at the same path in the container."""

    path: str
    write: bool


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container of one node."""

    run: str
    image: str
    """The image's file or reference; STAGED_IMAGE if the node may start its own copy."""
    accelerator: str
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations for the engine's hooks."""
    fabric: str = ""
    """The fabric between the nodes, if the engine itself brings the host's libraries for it."""
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
    """Whether the user's home is inside, if the engine's own configuration binds it."""
    one_machine: bool
    """Whether all nodes of the run are containers on this machine."""
    terminal: bool = False
    """Whether its streams may be a user's terminal."""
    mounts: tuple[Mount, ...]
    """The mounts of every node; node.sh adds what only some nodes have."""


class Engine:
    """Starts containers. A new engine is a subclass in a file of its own, registered in `dray.engines`."""

    name: ClassVar[str]
    image: ClassVar[Literal["file", "store", "python"]] = "file"
    """Where an image is: a file that nodes read, the engine's own store, or none: an installed Python."""
    formats: ClassVar[tuple[str, ...]] = ("sif", "squashfs")
    """The kinds of image that it starts from a file, the usual one first."""
    store_prefix: ClassVar[str] = ""
    """What the store puts before a name without a registry."""
    schedulers: ClassVar[frozenset[str]] = frozenset({"slurm", "hosts", "local"})
    """The schedulers that it works with."""
    isolates_env: ClassVar[bool] = True
    """Whether the ranks get only the variables that the plan names."""
    env_prefix: ClassVar[str] = ""
    """The prefix of a variable's name with which the engine passes it into the container."""
    script_mounts: ClassVar[bool] = True
    """Whether node.sh itself checks and lists the mounts."""
    read_only: ClassVar[str] = "ro"
    """The option of a mount that nobody may write."""
    unmountable: ClassVar[str] = ""
    """Characters that no mounted path may have, since they separate mounts or begin a variable."""
    host_libraries: ClassVar[bool] = False
    """Whether it adds libraries of the host to the container's library path."""
    names_devices: ClassVar[bool] = False
    """Whether each device of the host must be named."""
    gpu_access: ClassVar[dict[str, str]] = {}
    """How the container gets GPUs of a kind, if that needs a reason in the plan."""
    devices: ClassVar[dict[str, str]] = {}
    """For images of this kind: the file of bash whose `node::FILE ENGINE` fills `devices` with options."""
    slingshot: ClassVar[dict[str, str]] = {}
    """For images of this variant: how it brings the host's libraries for Slingshot, instead of the site's."""
    takes_annotations: ClassVar[bool] = False
    """Whether it has hooks that annotations turn on."""
    binds_layers: ClassVar[bool] = False
    """Whether it binds the content of a SIF, a layer, into a container of another image."""
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
        """The command that prints the id of a node's image; empty if there is none."""
        return []

    def annotations(self, _variant: str, _fabric: str, _site: Mapping[str, str]) -> dict[str, str]:
        """The annotations for its hooks, by the image's variant, the fabric, if any, and the site."""
        return {}

    def srun_options(self, _container: Container) -> list[str]:
        """The options of srun, if Slurm itself starts the container."""
        return []

    def files(self, _container: Container) -> dict[str, str]:
        """The files that it reads in the attempt's folder."""
        return {}
