"""The node check apart from GPUs: a process that the runner can kill. Started by file, as rank.py is: 30 ms."""

from __future__ import annotations

import os
import sys

# By file, since -m would look for dray where -S and -E have forbidden it. What Python itself has comes first.
if __name__ == "__main__":
    sys.path[:] = [*sys.path[1:], os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dray.contract import exit_codes, node
from dray.contract.findings import Finding
from dray.runner import rdma

_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
Check = Callable[[], "Finding | list[Finding]"]


def checks(plan: Mapping[str, Any]) -> Iterator[tuple[str, Check]]:
    """The checks, each with its name."""
    wanted, folder, variant = plan["preflight"], plan["folder"], plan["variant"]
    yield "shared memory", lambda: node.shared_memory(wanted["shared_memory_gb"])
    yield f"room in {node.SCRATCH}", lambda: node.free_space(node.SCRATCH, wanted["free_gb"])
    yield "the node's own folder", lambda: node.writable(plan["scratch"])
    yield "room in the run folder", lambda: node.free_space(folder, wanted["free_gb"])
    yield "the run folder", lambda: node.writable(folder)
    yield "memory", lambda: node.memory(wanted["memory_gb"])
    for variable in _NETWORK[: 1 if variant == "cpu" else 2]:
        if value := os.environ.get(variable):
            yield variable, functools.partial(_interfaces, variable, value)
    if variant != "cpu":
        several, kind = len(plan["world"]["nodes"]) > 1, plan["fabric"]["kind"]
        yield "locked memory", lambda: node.locked_memory(needed=several and kind in ("infiniband", "slingshot"))
        if several and kind != "slingshot":
            yield "RDMA cards", lambda: rdma.cards(needed=kind == "infiniband" or "IB" in plan["fabric"]["transport"])
    if variant.startswith("cuda"):
        yield "the kernel's log", node.xids


def _interfaces(variable: str, value: str) -> Finding:
    import socket  # noqa: PLC0415  5 ms, and few nodes have such a variable

    return node.interfaces(variable, value, [name for _, name in socket.if_nameindex()])


def found(name: str, check: Check) -> list[Finding]:
    """The errors and warnings of a check; a check that cannot run is an error too."""
    try:
        made = check()
    except OSError as error:
        text = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        made = Finding(f"{name}: the check failed", found=text, code=exit_codes.UNFIT)
    return [one for one in (made if isinstance(made, list) else [made]) if one.level in ("error", "warning")]


def main(path: str) -> None:
    """Print the name of each check and its findings, one JSON object per line."""
    with open(path, "rb") as file:
        plan = json.load(file)
    for name, check in checks(plan):
        print(json.dumps({"phase": name}), flush=True)
        for finding in found(name, check):
            print(json.dumps({"finding": finding._asdict()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
