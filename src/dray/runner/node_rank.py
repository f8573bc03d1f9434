"""This node's number, from the variables of its own task, checked against the plan; and its command."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dray.contract.findings import ConfigError, listed
from dray.runner.plan import Plan, World


def index(world: World) -> int:
    """This node's number in the plan. ConfigError: the plan expects another node."""
    variables = [world.identity.nodes, world.identity.node, world.identity.name]
    places = [(str(len(world.nodes)), str(place), node.name) for place, node in enumerate(world.nodes)]
    found = tuple(os.environ.get(name, "") for name in variables)
    if found not in places:
        raise ConfigError(
            "this task is not a node of the plan",
            wanted=listed(_settings(variables, values) for values in places),
            found=_settings(variables, found),
            fix="start node.sh with one task on each node of the plan: srun --nodes=N --ntasks-per-node=1; "
            "do not export these variables before it: each task has its own",
        )
    return places.index(found)


def _settings(names: list[str], values: Sequence[str]) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def require(plan: Plan) -> None:
    """Refuse a command that cannot start in the container, before every rank fails with it."""
    first, *rest = plan.command
    folder, path = plan.where, os.environ.get("PATH", os.defpath)
    script = os.path.join(folder, *rest[:1])
    places, wanted = path.split(os.pathsep), f"{first} on PATH ({path})"
    if "/" in first:
        places, wanted = [folder], f"an executable file {os.path.join(folder, first)}"
    if script.endswith(".py") and not os.path.exists(script):
        first, wanted = rest[0], f"a file {script}"
    elif any(os.access(os.path.join(place, first), os.X_OK) for place in places):
        return
    raise ConfigError(
        f"the program is not in the container: {first}",
        wanted=wanted,
        found="no such file in the container",
        fix="correct the path, or make the file executable (chmod +x). The container sees the folder where you submit, "
        "the recipe's folders and the binds that dray plan -v lists; [[binds]] in a site file add others "
        "(docs/launch.md)",
    )
