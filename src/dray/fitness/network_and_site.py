"""This machine's network devices, and the site that it belongs to."""

from __future__ import annotations

import socket
from pathlib import Path

from dray.config import sites
from dray.runs import slurm


def site(name: str = "") -> sites.Choice:
    """The site of this name, else the one that this machine belongs to."""
    if name:
        return sites.Choice(sites.find(name), sites.NAMED)
    return sites.detect(slurm.cluster_name(), socket.gethostname())


def devices(root: Path = Path("/")) -> list[str]:
    """The devices of Slingshot, such as cxi0, and of InfiniBand, such as mlx5_0."""
    found = [*root.glob("dev/cxi[0-9]*"), *root.glob("sys/class/infiniband/*")]
    return sorted(path.name for path in found)


def interfaces(root: Path = Path("/")) -> list[str]:
    """The network interfaces with a device of their own: no bridges, and no links of containers."""
    return sorted(path.parent.name for path in (root / "sys/class/net").glob("*/device"))
