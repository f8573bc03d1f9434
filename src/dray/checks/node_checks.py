"""The checks of a node that need no torch: memory, disks, network interfaces, RDMA cards, the kernel's log."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dray.contract import exit_codes, node
from dray.contract.findings import Finding

_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LIBIBVERBS = "libibverbs.so.1"
_ABI = re.compile(r"Driver \S+ does not support the kernel ABI .*\)")
_UNLOADED = re.compile(r"couldn't load driver .*")
_RDMA_FILES = Path("/dev/infiniband")
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
            yield "RDMA cards", partial(rdma_cards, needed=needed)
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


def rdma_cards(*, needed: bool, sys: str = "/sys", library: str = _LIBIBVERBS) -> list[Finding]:
    """The cards that libibverbs cannot use: an error if RDMA is needed and no card is left.

    Without them NCCL and RCCL silently use sockets. No file says which kernel ABI a driver in the image supports. So
    dray asks libibverbs, as NCCL does, and its warnings are the reasons.
    """
    files = {path.read_text().strip(): path.parent.name for path in Path(sys).glob("class/infiniband_verbs/*/ibdev")}
    if not files:
        return []
    try:
        usable, warnings = _ask_libibverbs(library)
    except OSError as error:
        usable, warnings = [], [f"couldn't load driver {error}"]
    reasons: dict[str, list[str]] = {}
    for device in sorted(files.keys() - usable):
        refused = [match[0] for line in warnings if line.endswith(f"/{device}") and (match := _ABI.search(line))]
        if refused or not usable:  # else it is a card that nobody wanted
            reasons.setdefault("; ".join(refused) or _absent(files[device], warnings), []).append(device)
    left = " ".join(usable)
    return [
        Finding(
            f"RDMA would be off{' on some cards' if left else ''}: {reason}",
            wanted="a driver in the image for each RDMA card of the node",
            found=f"not usable: {' '.join(devices)}; usable: {left or 'none'}",
            fix="use an image whose drivers fit the node's kernel, or bind the node's own; see docs/sites.md",
            code=exit_codes.UNFIT if needed and not left else exit_codes.DONE,
        )
        for reason, devices in reasons.items()
    ]


def _absent(file: str, warnings: list[str]) -> str:
    if not (_RDMA_FILES / file).exists():
        return f"the container's {_RDMA_FILES} lacks them"
    unloaded = [match[0] for line in warnings if (match := _UNLOADED.search(line))]
    return "; ".join(unloaded) or "the image has no driver for the node's RDMA cards"


def _ask_libibverbs(library: str) -> tuple[list[str], list[str]]:
    """The devices that libibverbs lists, and the warnings that it writes to stderr meanwhile."""
    verbs = ctypes.CDLL(library)
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    count, error_output, output = ctypes.c_int(0), os.dup(2), os.memfd_create("warnings")
    os.dup2(output, 2)
    try:
        devices = verbs.ibv_get_device_list(ctypes.byref(count))
    finally:
        os.dup2(error_output, 2)
        os.close(error_output)
    warnings = os.pread(output, 1 << 20, 0).decode(errors="replace").splitlines()
    os.close(output)
    return [verbs.ibv_get_device_name(devices[number]).decode() for number in range(count.value)], warnings
