"""The checks of a node that need no torch: memory, disks, network interfaces and cards, the kernel's log."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from dray.checks import rdma
from dray.contract import exit_codes, node
from dray.contract.findings import Finding

_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
Check = Callable[[], "Finding | list[Finding]"]


def checks(plan: Mapping[str, Any]) -> Iterator[tuple[str, Check]]:
    """The checks, each with its name."""
    wanted, folder, variant = plan["preflight"], plan["folder"], plan["variant"]
    yield "shared memory", partial(node.shared_memory, wanted["shared_memory_gb"])
    yield f"room in {node.SCRATCH}", partial(node.free_space, node.SCRATCH, wanted["free_gb"])
    yield "the node's own folder", partial(node.writable, plan["scratch"])
    yield "room in the run folder", partial(node.free_space, folder, wanted["free_gb"])
    yield "the run folder", partial(node.writable, folder)
    yield "memory", partial(node.memory, wanted["memory_gb"])
    for variable in _NETWORK[: 1 if variant == "cpu" else 2]:
        if value := os.environ.get(variable):
            yield variable, partial(node.interfaces, variable, value, [name for _, name in socket.if_nameindex()])
    if variant != "cpu":
        several, kind = len(plan["world"]["nodes"]) > 1, plan["fabric"]["kind"]
        yield "locked memory", partial(node.locked_memory, needed=several and kind in ("infiniband", "slingshot"))
        if several and kind != "slingshot":
            needed = kind == "infiniband" or "IB" in plan["fabric"]["transport"]
            yield "RDMA cards", partial(rdma.cards, needed=needed)
    if variant.startswith("cuda"):
        yield "the kernel's log", node.xids


def findings(name: str, check: Check) -> list[Finding]:
    """The errors and warnings of a check; a check that cannot run is an error too."""
    try:
        result = check()
    except OSError as error:
        result = Finding(f"{name}: the check failed", found=str(error), code=exit_codes.UNFIT)
    listed = result if isinstance(result, list) else [result]
    return [finding for finding in listed if finding.level in ("error", "warning")]
