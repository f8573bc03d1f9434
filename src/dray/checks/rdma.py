"""Whether this image can use the node's RDMA cards: if not, NCCL and RCCL silently use sockets.

No file says which kernel ABI a driver in the image supports. So dray asks libibverbs, as NCCL does, and its warnings
are the reasons.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from dray.contract import exit_codes
from dray.contract.findings import Finding

_LIBRARY = "libibverbs.so.1"
_ABI = re.compile(r"Driver \S+ does not support the kernel ABI .*\)")
_UNLOADED = re.compile(r"couldn't load driver .*")
_FILES = Path("/dev/infiniband")


def cards(*, needed: bool, sys: str = "/sys", library: str = _LIBRARY) -> list[Finding]:
    """The cards that libibverbs cannot use: an error if RDMA is needed and no card is left."""
    files = {path.read_text().strip(): path.parent.name for path in Path(sys).glob("class/infiniband_verbs/*/ibdev")}
    if not files:
        return []
    try:
        usable, warnings = _ask(library)
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
    if not (_FILES / file).exists():
        return f"the container's {_FILES} lacks them"
    unloaded = [match[0] for line in warnings if (match := _UNLOADED.search(line))]
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
    warnings = os.pread(output, 1 << 20, 0).decode(errors="replace").splitlines()
    os.close(output)
    return [verbs.ibv_get_device_name(devices[number]).decode() for number in range(count.value)], warnings
