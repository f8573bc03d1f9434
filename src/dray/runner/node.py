"""Who this node is, by the variables of its own task, held against the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dray.contract import run_folder
from dray.contract.findings import ConfigError, counted


def index(world: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """This node's number in the plan. A node that is not who the plan expects stops here."""
    names = world["identity"]
    nodes = world["nodes"]
    count = _number(names["nodes"], environ)
    if count != len(nodes):
        raise ConfigError(
            f"the plan is for another number of nodes than {names['nodes']} says",
            wanted=counted(len(nodes), "node"),
            found=f"{names['nodes']}={count}",
            fix="start node.sh with one task on each node of the plan: srun --nodes=N --ntasks-per-node=1",
        )
    number = _number(names["node"], environ)
    if not 0 <= number < count:
        raise ConfigError(
            f"{names['node']} is not a node of the plan",
            wanted=f"0 to {count - 1}",
            found=f"{names['node']}={number}",
            fix="start node.sh through srun, which numbers the nodes",
        )
    name = environ.get(names["name"], "")
    if name != nodes[number]["name"]:
        raise ConfigError(
            f"this node believes that it is node {number}, and the plan has another host there",
            wanted=f"node {number} is {nodes[number]['name']}",
            found=f"{names['name']}={name or '(not set)'}, {names['node']}={number}",
            fix=f"{names['node']} must come from each node's own task; do not export it before srun",
        )
    return number


def require(plan: Mapping[str, Any]) -> None:
    """Refuse a command whose program is not in the container, before every rank dies of it."""
    first, *rest = plan["command"]
    programs = [word for word in rest[:1] if word.endswith(".py")] + [first] * ("/" in first)
    for word in programs:
        if not os.path.exists(os.path.join(plan["where"], word)):
            raise ConfigError(
                f"the program is not in the container: {word}",
                wanted=f"a file {os.path.join(plan['where'], word)}",
                found="no such file, seen from inside",
                fix="correct the path. Inside, a node sees the folder where you submit, the recipe's folders and the "
                "binds that dray plan -v lists; another one by [[binds]] in a site file (docs/launch.md)",
            )


def own(plan: Mapping[str, Any]) -> str:
    """The node's own folder, where a run of many ranks has what is else on the shared disk; empty in a small run."""
    return str(plan["scratch"]) if plan["world"].get("logs_by_node") else ""


def log_of(plan: Mapping[str, Any], rank: int) -> tuple[str, str]:
    """Where the lines of a rank are, and that folder."""
    found = own(plan)
    name = run_folder.node_log(rank // plan["world"]["ranks_per_node"]) if found else run_folder.rank_log(rank)
    return f"{plan['folder']}/{name}", found


def _number(name: str, environ: Mapping[str, str]) -> int:
    value = environ.get(name)
    if value is None or not value.isdigit():
        raise ConfigError(
            f"{name} does not tell this node who it is",
            wanted=f"{name}=0 or more",
            found=f"{name}={value}" if value is not None else f"{name} is not set",
            fix="start node.sh through srun; inside a container the engine must let this variable through",
        )
    return int(value)
