"""A process group that is smaller than the world: its ranks have worked apart, and a result would not show it."""

from __future__ import annotations

import json

from dray.contract import files
from dray.planning.schema import Plan
from dray.runs.paths import RunPaths

_SHOWN = 8  # ranks
_LIMIT = 1 << 20  # bytes; the file names each rank
_FIX = "call init_process_group() in each rank without rank= and world_size=: RANK and WORLD_SIZE tell it both"


def warning(paths: RunPaths, plan: Plan) -> str | None:
    """None where all ranks are in one, or no rank is in any, or nobody can tell."""
    try:
        found = json.loads(files.read(paths.process_group, limit=_LIMIT))
    except FileNotFoundError:
        return None
    world, absent = plan.world, [int(rank) for rank in found["absent"]]
    names = [f"rank {rank} on {world.nodes[rank // world.ranks_per_node].name}" for rank in absent[:_SHOWN]]
    listed = f" (not in it: {', '.join(names)}{', ...' * bool(absent[_SHOWN:])})" if names else ""
    group = f"the largest process group has {int(found['largest'])} of the {world.size} ranks{listed}"
    return f"{group}: they have worked apart, maybe in the same files; {_FIX}"
