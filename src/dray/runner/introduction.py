"""Who a node is and what it holds, and what is wrong with that in the eyes of the first node."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dray import __version__
from dray.contract.findings import ConfigError, DrayError, UnfitError

_MOST_SKEW_S = 8.0
_MOST_NODES = 1 << 20
_LONGEST = 256  # letters of a text
_LATEST = 1e11  # no clock of this millennium; it also keeps out what is no number
_HELD = (
    (
        "plan",
        "the run folder must be on a disk that all nodes share, or at the same path on every machine; HF_HOME too",
    ),
    ("dray", "the same image on every node"),
    ("image", "copy the image to this node again, or put it on a disk that all nodes share"),
)


class StoppedError(DrayError):
    """The first node has refused the launch: why is recorded, there or on the nodes that are unfit."""


def introduction(plan: Mapping[str, Any], number: int, digest: str, unfit: str = "") -> dict[str, Any]:
    """Who this node is, what all nodes must hold alike, and why it is unfit by its own check."""
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


def readable(hello: Mapping[str, Any], own: Mapping[str, Any], nodes: int) -> bool:
    """Whether it has the fields of an introduction, each of its type and within its range."""
    if {name: type(value) for name, value in hello.items()} != {name: type(value) for name, value in own.items()}:
        return False
    texts = [value for value in hello.values() if isinstance(value, str)]
    # Another plan may have more nodes, and is refused by a name of its own.
    most = nodes if hello["plan"] == own["plan"] else _MOST_NODES
    return all(len(text) <= _LONGEST and text.isprintable() for text in texts) and (
        0 <= hello["node"] < most and 0 <= hello["time"] < _LATEST
    )


def odd(
    hello: Mapping[str, Any],
    own: Mapping[str, Any],
    guests: Mapping[int, object],
    twin: str | None,
) -> DrayError | None:
    """What is wrong with a node that has come. `own` is what the first node holds, at the time at which it came."""
    who = f"node {hello['node']} ({hello['name']})"
    for held, fix in _HELD:
        if hello[held] != own[held]:
            return ConfigError(
                f"{who} holds another {held}",
                wanted=f"{held} {own[held][:12] or '(unknown)'}",
                found=f"{held} {hello[held][:12] or '(unknown)'}",
                fix=fix,
            )
    if hello["node"] in guests or hello["node"] == own["node"]:
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
    return None
