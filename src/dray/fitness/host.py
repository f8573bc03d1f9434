"""What this machine shows of Slurm, of its network and of the site that it belongs to."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from dray import process
from dray.config import sites


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition of Slurm's, and what a node of it has."""

    name: str
    nodes: int
    cpus: int
    gres: str

    @property
    def gpus(self) -> int:
        return sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", self.gres))


@dataclass(frozen=True, kw_only=True)
class Network:
    """The devices and interfaces that connect this machine with others."""

    slingshot: tuple[str, ...]
    infiniband: tuple[str, ...]
    interfaces: tuple[str, ...]
    """Those with a device of their own: no bridges, and no containers' ends of links."""


def cluster_name() -> str:
    """What Slurm calls this cluster; empty without Slurm."""
    name = os.environ.get("SLURM_CLUSTER_NAME", "")
    if name or not process.which("scontrol"):
        return name
    config = process.run(["scontrol", "show", "config"], check=False).out
    found = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    return found[1] if found else ""


def site(name: str = "") -> sites.Choice:
    """The site of this name, else the one that this machine belongs to."""
    if name:
        return sites.Choice(sites.find(name), sites.NAMED)
    return sites.detect(cluster_name(), socket.gethostname())


def partitions() -> list[Partition]:
    """Slurm's partitions, in its own order; none without Slurm."""
    if not process.which("sinfo"):
        return []
    lines = process.run(["sinfo", "--noheader", "--format=%R|%D|%c|%G"]).out.splitlines()
    found = []
    for line in dict.fromkeys(lines):
        name, nodes, cpus, gres = line.split("|")
        found.append(Partition(name=name, nodes=_number(nodes), cpus=_number(cpus), gres=gres))
    return found


def _number(text: str) -> int:
    return int(re.sub(r"\D.*", "", text) or 0)


def network(root: Path = Path("/")) -> Network:
    """Read from /sys and /dev."""
    return Network(
        slingshot=_names(root, "dev/cxi[0-9]*"),
        infiniband=_names(root, "sys/class/infiniband/*"),
        interfaces=tuple(sorted(path.parent.name for path in (root / "sys/class/net").glob("*/device"))),
    )


def _names(root: Path, pattern: str) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in root.glob(pattern)))
