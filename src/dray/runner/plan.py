"""The plan, as plan.json has it: the nodes and ranks of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Environ = Mapping[str, str]
Endpoint = tuple[str, int]
"""An address and a port."""
Plan = Mapping[str, Any]
World = Mapping[str, Any]
"""The plan's part about the nodes, their ranks and the network between them."""


def ranks(plan: Plan, node: int) -> range:
    """The ranks of a node."""
    each = plan["world"]["ranks_per_node"]
    return range(node * each, (node + 1) * each)


def names(plan: Plan) -> list[str]:
    """The names of all nodes."""
    return [node["name"] for node in plan["world"]["nodes"]]
