"""What a machine is: processor, memory, kernel, GPUs, and the packages of this Python. Read from /proc and /sys alone.

A run on another machine cannot have it the same, and a capsule says so. What cannot be read is left empty.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from dray.contract import cores, node
from dray.contract.node import proc_text

_SYS = "/sys/devices/system/node"
_NVIDIA = "/proc/driver/nvidia/gpus"
_AMD = "/sys/class/drm"
_MOST = 4096  # packages, and letters of a text


def look(accelerator: str, environ: Mapping[str, str], *, packages: bool = False) -> dict[str, Any]:
    """This machine, as a process with that environment sees it."""
    system = os.uname()
    memory = re.search(r"^MemTotal: +(\d+) kB$", proc_text("/proc/meminfo"), re.MULTILINE)
    threads = environ.get("OMP_NUM_THREADS", "")
    found = {
        "host": system.nodename,
        "cpu": _processor(proc_text("/proc/cpuinfo")) or system.machine,
        "cpus": os.cpu_count() or 0,
        "usable_cpus": cores.render(os.sched_getaffinity(0)),
        "cores_of_ranks": environ.get("DRAY_CORES", ""),
        "threads": int(threads) if threads.isdecimal() and len(threads) < 6 else None,
        "numa": [proc_text(f"{_SYS}/{name}/cpulist").strip() for name in _numbered(_SYS, "node")],
        "memory_gb": round(int(memory[1]) * 1024 / 1e9, 1) if memory else None,
        "kernel": f"{system.sysname} {system.release}",
        "libc": _libc(),
        "python": sys.version.partition(" ")[0],
        "gpus": _gpus(accelerator),
        "driver": node.driver(accelerator) or "",
    }
    return {**found, "packages": _packages()} if packages else found


def _processor(text: str) -> str:
    """Its model; ARM's have numbers alone."""
    named = re.search(r"^(?:model name|cpu|Processor)\s*: (.+)$", text, re.MULTILINE)
    parts = re.findall(r"^CPU (implementer|part)\s*: (\S+)$", text, re.MULTILINE)[:2]
    return named[1].strip() if named else " ".join(f"{name} {value}" for name, value in parts)


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _gpus(accelerator: str) -> list[str]:
    """By their makers' names, in the order of their addresses; also those that this job was not given."""
    if accelerator == "cuda":
        texts = (proc_text(f"{_NVIDIA}/{name}/information") for name in _names(_NVIDIA))
        return [found[1].strip() for text in texts if (found := re.search(r"^Model:(.+)$", text, re.MULTILINE))]
    if accelerator == "rocm":
        cards = (proc_text(f"{_AMD}/{name}/device/product_name").strip() for name in _numbered(_AMD, "card"))
        return [card for card in cards if card]
    return []


def _packages() -> dict[str, str]:
    """By the names of their metadata's folders: to read each file would take a second on a network disk."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for name in _names(folder):
            if name.endswith(".dist-info") and len(found) < _MOST:
                package, _, version = name.removesuffix(".dist-info").partition("-")
                found.setdefault(re.sub("[-_.]+", "-", package).lower(), version)
    return dict(sorted(found.items()))


def _numbered(folder: str, kind: str) -> list[str]:
    names = [name for name in _names(folder) if re.fullmatch(rf"{kind}\d+", name)]
    return sorted(names, key=lambda name: int(name.removeprefix(kind)))


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder or "."))
    except OSError:
        return []
