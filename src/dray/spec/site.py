"""A site: what a cluster asks for and offers, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dray import checkout
from dray.errors import ConfigError
from dray.spec.model import Spec, load


class SiteBind(Spec):
    """A folder of the host that the container sees at the same place."""

    path: Annotated[str, Field(pattern=r"^/")]
    """Absolute path."""
    why: str
    """What breaks without it."""
    write: bool = False
    """Whether ranks may write there."""


class SiteVariable(Spec):
    """One environment variable that this cluster needs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Its name."""
    value: str
    """Its value."""
    why: str
    """What breaks without it."""


class Site(Spec):
    """One cluster's profile."""

    name: str
    """The file's own name."""
    about: str
    """Which machine this is."""
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
    cores: tuple[Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")], ...] = ()
    """The cores of each local rank, such as 49-55; used where a job has all of them and as many ranks on a node."""


def find(name: str) -> Site:
    """The site of this name under slurm/sites, or the file that `name` is the path of."""
    folder = checkout.root() / "slurm" / "sites"
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.exists() and not name.endswith(".toml"):
        raise ConfigError(
            f"there is no site {name!r}",
            where=folder,
            wanted=", ".join(sorted(entry.stem for entry in folder.glob("*.toml"))),
            fix="name one of these, or give the path of your own site file (ending in .toml)",
        )
    return load(Site, path)
