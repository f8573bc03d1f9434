"""A node's hello: which node it is and what it holds; and the first node's check of that."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Mapping
from typing import Any

from dray import __version__
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.runner.protocol import Hello

_MOST_SKEW_S = 8.0
_HELD = (
    (
        "plan",
        "put the run folder and HF_HOME on a disk that all nodes share, or at the same path on every machine",
    ),
    ("dray", "use the same image on every node"),
    ("image", "copy the image to this node again, or put it on a disk that all nodes share"),
)


class StoppedError(DrayError):
    """The first node has refused the launch; the reason is recorded there, or by the unfit nodes."""


def make_hello(plan: Mapping[str, Any], number: int, digest: str, unfit: str = "") -> Hello:
    """This node's number and name, what all nodes must hold alike, and why its own check found it unfit."""
    world = plan["world"]
    return Hello(
        node=number,
        name=world["nodes"][number]["name"],
        host=os.uname().nodename,
        runner=os.urandom(8).hex(),
        plan=digest,
        image=os.environ.get(world["identity"]["image"], ""),
        dray=__version__,
        unfit=unfit,
        time=time.time(),
    )


def why_refused(hello: Hello, own: Hello, here: Container[int], twin: str | None) -> DrayError | None:
    """Why a node that has come is refused, if it is. `own` is the first node's hello at that time."""
    who = f"node {hello.node} ({hello.name})"
    for held, fix in _HELD:
        wanted, found = getattr(own, held), getattr(hello, held)
        if found != wanted:
            return ConfigError(
                f"{who} has a different {held}",
                wanted=f"{held} {wanted[:12] or '(unknown)'}",
                found=f"{held} {found[:12] or '(unknown)'}",
                fix=fix,
            )
    if hello.node in here or hello.node == own.node:
        return ConfigError(
            f"two nodes have the number {hello.node}",
            wanted="a number of its own for every node",
            found=f"{hello.name} has it too",
            fix="do not export the node's number before srun: each node takes it from its own task",
        )
    if twin:
        return ConfigError(
            f"{who} and {twin} have the same host name",
            wanted="different host names, by which libraries tell nodes apart",
            found=hello.host,
            fix="give each machine a host name of its own; under Slurm start one task a node (--ntasks-per-node=1)",
        )
    skew = abs(hello.time - own.time)
    if skew > _MOST_SKEW_S:
        return UnfitError(
            f"the clock of {who} is {skew:.0f} s away from the first node's",
            wanted=f"at most {_MOST_SKEW_S:.0f} s",
            found=f"{skew:.0f} s",
            fix="leave this node out (sbatch --exclude), and tell the cluster's administrators",
        )
    return None
