"""Who a node is and what it holds, and what is wrong with that in the eyes of the first node."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dray import __version__
from dray.contract.findings import ConfigError, DrayError, UnfitError

_MOST_SKEW_S = 8.0


def introduction(plan: Mapping[str, Any], number: int, digest: str) -> dict[str, Any]:
    """Who this node is, and what all nodes must hold alike."""
    return {
        "node": number,
        "name": plan["world"]["nodes"][number]["name"],
        "host": os.uname().nodename,
        "plan": digest,
        "image": os.environ.get(plan["world"]["identity"]["image"], ""),
        "dray": __version__,
        "time": time.time(),
    }


def odd(
    world: Mapping[str, Any],
    hello: Mapping[str, Any],
    own: Mapping[str, Any],
    guests: Mapping[int, object],
    twin: str | None,
) -> DrayError | None:
    """What is wrong with a node that has come. `own` is what the first node holds, at the time at which it came."""
    who = f"node {hello['node']} ({hello['name']})"
    if hello["node"] in guests or hello["node"] == own["node"] or hello["node"] not in range(len(world["nodes"])):
        return ConfigError(
            f"two nodes believe that they are node {hello['node']}",
            wanted="every node has its own number",
            found=f"{hello['name']} is the second one",
            fix="the node's number must come from each node's own task; do not export it before srun",
        )
    if twin:
        return ConfigError(
            f"{who} and {twin} have the same host name",
            wanted="nodes of different host names: libraries tell nodes apart by them",
            found=hello["host"],
            fix="give the machines names of their own; or were two tasks started on one node?",
        )
    skew = abs(hello["time"] - own["time"])
    if skew > _MOST_SKEW_S:
        return UnfitError(
            f"the clock of {who} is {skew:.0f} s away from the first node's",
            wanted=f"at most {_MOST_SKEW_S:.0f} s",
            found=f"{skew:.0f} s",
            fix="leave this node out (sbatch --exclude), and tell the cluster's administrators",
        )
    for held, fix in (
        (
            "plan",
            "the run folder must be on a disk that all nodes share, or at the same path on every machine; HF_HOME too",
        ),
        ("dray", "the same image on every node"),
        ("image", "copy the image to this node again, or put it on a disk that all nodes share"),
    ):
        if hello[held] != own[held]:
            return ConfigError(
                f"{who} holds another {held}",
                wanted=f"{held} {own[held][:12] or '(unknown)'}",
                found=f"{held} {hello[held][:12] or '(unknown)'}",
                fix=fix,
            )
    return None
