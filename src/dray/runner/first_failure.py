"""The first failure of this node's ranks: the others of the node, and perhaps of the run, failed because of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from dray.contract import failures, run_folder
from dray.runner import unrecorded_deaths


def failure(plan: Mapping[str, Any], me: int) -> dict[str, Any] | None:
    """The record of that failure; None if no rank has failed by itself."""
    unrecorded_deaths.record_ranks(plan, me)
    each, found = plan["world"]["ranks_per_node"], []
    for rank in range(me * each, (me + 1) * each):
        path = f"{plan['folder']}/{run_folder.failure(f'rank-{rank}')}"
        if os.path.exists(path):
            with open(path, "rb") as file:
                found.append(json.load(file))
    if not found:
        return None
    begin = min(float(one["time"]) for one in found)
    first: dict[str, Any] = min(found, key=lambda one: failures.order(float(one["time"]), begin, lambda: _follows(one)))
    return first


def _follows(one: Mapping[str, Any]) -> bool:
    return failures.follows([one["why"], *one["last_lines"]])
