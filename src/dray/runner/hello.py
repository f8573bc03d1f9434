"""A node's hello: which node it is and what it holds; and the first node's check of that."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dray import __version__
from dray.contract.findings import ConfigError, DrayError, Finding, UnfitError

_MOST_SKEW_S = 8.0
_LONGEST_REASON = 256  # letters that the other nodes hear
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


def check_limit_s(world: Mapping[str, Any]) -> float:
    """Seconds that a node's own check may take: half of the time for which the others wait in the rendezvous."""
    return float(world["rendezvous_timeout_s"]) / 2


def unfit_reason(unfit: Finding | None) -> str:
    """Why this node is unfit, as one line for the other nodes; empty if it is fit."""
    return " ".join(unfit.problem.split())[:_LONGEST_REASON] if unfit else ""


def make_hello(plan: Mapping[str, Any], number: int, digest: str, unfit: str = "") -> dict[str, Any]:
    """This node's number and name, what all nodes must hold alike, and why its own check found it unfit."""
    return {
        "node": number,
        "name": plan["world"]["nodes"][number]["name"],
        "host": os.uname().nodename,
        "runner": os.urandom(8).hex(),  # one that comes again is told from another with its number
        "plan": digest,
        "image": os.environ.get(plan["world"]["identity"]["image"], ""),
        "dray": __version__,
        "unfit": unfit,
        "time": time.time(),
    }


def why_refused(
    hello: Mapping[str, Any],
    own: Mapping[str, Any],
    guests: Mapping[int, object],
    twin: str | None,
) -> DrayError | None:
    """Why a node that has come is refused, if it is. `own` is the first node's hello at that time."""
    who = f"node {hello['node']} ({hello['name']})"
    for held, fix in _HELD:
        if hello[held] != own[held]:
            return ConfigError(
                f"{who} has a different {held}",
                wanted=f"{held} {own[held][:12] or '(unknown)'}",
                found=f"{held} {hello[held][:12] or '(unknown)'}",
                fix=fix,
            )
    if hello["node"] in guests or hello["node"] == own["node"]:
        return ConfigError(
            f"two nodes have the number {hello['node']}",
            wanted="a number of its own for every node",
            found=f"{hello['name']} has it too",
            fix="do not export the node's number before srun: each node takes it from its own task",
        )
    if twin:
        return ConfigError(
            f"{who} and {twin} have the same host name",
            wanted="different host names, by which libraries tell nodes apart",
            found=hello["host"],
            fix="give each machine a host name of its own; under Slurm start one task a node (--ntasks-per-node=1)",
        )
    skew = abs(hello["time"] - own["time"])
    if skew > _MOST_SKEW_S:
        return UnfitError(
            f"the clock of {who} is {skew:.0f} s away from the first node's",
            wanted=f"at most {_MOST_SKEW_S:.0f} s",
            found=f"{skew:.0f} s",
            fix="leave this node out (sbatch --exclude), and tell the cluster's administrators",
        )
    return None
