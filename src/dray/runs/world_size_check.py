"""Warn of a process group smaller than the world: its ranks trained separately, which the result would not show."""

from __future__ import annotations

import json

from dray.contract import files
from dray.planning.schema import Plan
from dray.runs.store import RunPaths

_FIX = "call init_process_group() in each rank without rank= and world_size=: it reads RANK and WORLD_SIZE"


def warning(paths: RunPaths, plan: Plan) -> str | None:
    """The warning; None if all ranks share a group, no rank has one, or nothing was recorded."""
    try:
        found = json.loads(files.read(paths.process_group))
    except FileNotFoundError:
        return None
    group = f"the largest process group has {int(found['largest'])} of the {plan.world.size} ranks"
    return f"{group}: the other ranks trained separately, maybe in the same files; {_FIX}"
