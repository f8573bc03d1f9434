"""This machine's network devices, and the site that it belongs to."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from dray.config import sites
from dray.runs import slurm


@dataclass(frozen=True, kw_only=True)
class Network:
    """The devices and interfaces that connect this machine with others."""

    slingshot: tuple[str, ...]
    infiniband: tuple[str, ...]
    interfaces: tuple[str, ...]
    """Interfaces with a device of their own: no bridges, and no links of containers."""


def site(name: str = "") -> sites.Choice:
    """The site of this name, else the one that this machine belongs to."""
    if name:
        return sites.Choice(sites.find(name), sites.NAMED)
    return sites.detect(slurm.cluster_name(), socket.gethostname())


def network(root: Path = Path("/")) -> Network:
    """The devices and interfaces in /sys and /dev."""
    return Network(
        slingshot=_names(root, "dev/cxi[0-9]*"),
        infiniband=_names(root, "sys/class/infiniband/*"),
        interfaces=tuple(sorted(path.parent.name for path in (root / "sys/class/net").glob("*/device"))),
    )


def _names(root: Path, pattern: str) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in root.glob(pattern)))
