"""Whether this image can use the node's RDMA cards: if not, NCCL and RCCL silently use sockets.

No file says which kernel ABI a driver in the image supports. So dray asks libibverbs, as NCCL does, and its warnings
are the reasons.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dray.contract import exit_codes
from dray.contract.findings import Finding

_LIBRARY = "libibverbs.so.1"
_ABI = re.compile(r"Driver (\S+) does not support the kernel ABI of (\d+) \(supports (\d+) to (\d+)\) for device (\S+)")
_UNLOADED = re.compile(r"couldn't load driver .*")
_FIX = "use an image whose drivers fit the node's kernel, or bind the node's own; see docs/sites.md"


def cards(*, needed: bool, sys: str = "/sys", library: str = _LIBRARY) -> list[Finding]:
    """The cards that libibverbs cannot use: an error if RDMA is needed and no card is left."""
    present = _devices(sys)
    if not present:
        return []
    try:
        usable, warnings = _ask(library)
    except OSError as error:
        return [_finding(f"the image cannot load libibverbs: {error}", list(present), [], needed=needed)]
    reasons: dict[str, list[str]] = {}
    for device, uverbs in present.items():
        if device in usable:
            continue
        reason = _refused(device, warnings)
        if reason or not usable:
            reasons.setdefault(reason or _absent(uverbs, warnings), []).append(device)
    return [_finding(reason, devices, usable, needed=needed) for reason, devices in reasons.items()]


def _finding(reason: str, devices: Iterable[str], usable: Iterable[str], *, needed: bool) -> Finding:
    left = " ".join(usable)
    return Finding(
        f"{reason}: RDMA would be off{' on these cards' if left else ''}",
        wanted="a driver in the image for each RDMA card of the node",
        found=f"not usable: {' '.join(devices)}; usable: {left or 'none'}",
        fix=_FIX,
        code=exit_codes.UNFIT if needed and not left else exit_codes.DONE,
    )


def _devices(sys: str) -> dict[str, str]:
    """The kernel's RDMA devices, such as ionic_0, each with the name of its file in /dev/infiniband."""
    found = {}
    for path in sorted(Path(sys, "class/infiniband_verbs").glob("uverbs*/ibdev")):
        found[path.read_text(encoding="ascii", errors="replace").strip()] = path.parent.name
    return found


def _refused(device: str, warnings: Iterable[str]) -> str:
    for line in warnings:
        told = _ABI.search(line)
        if told and told[5].rpartition("/")[2] == device:
            driver, kernel, first, last = told.group(1, 2, 3, 4)
            spoken = first if first == last else f"{first} to {last}"
            return f"the image's driver for {driver} speaks ABI {spoken}, the node's kernel {kernel}"
    return ""


def _absent(uverbs: str, warnings: Iterable[str]) -> str:
    if not Path("/dev/infiniband", uverbs).exists():
        return "the container's /dev/infiniband lacks them"
    unloaded = [told[0] for line in warnings if (told := _UNLOADED.search(line))]
    return "; ".join(unloaded) or "the image has no driver for the node's RDMA cards"


def _ask(library: str) -> tuple[list[str], list[str]]:
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
    with os.fdopen(output, encoding="utf-8", errors="replace") as file:
        file.seek(0)
        lines = file.read().splitlines()
    names = [verbs.ibv_get_device_name(devices[number]) for number in range(count.value)] if devices else []
    return [name.decode(errors="replace") for name in names], lines
