"""What a machine is: processor, memory, kernel, GPUs, and the packages of this Python. Read from /proc and /sys alone.

A run on another machine cannot have it the same, and a capsule says so. What cannot be read is left empty.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from dray.contract import cores, node
from dray.contract.node import proc_text

_GPUS = {
    "cuda": ("/proc/driver/nvidia/gpus/*/information", "^Model:(.+)$"),
    "rocm": ("/sys/class/drm/card[0-9]*/device/product_name", "(.+)"),
}


def look(accelerator: str, environ: Mapping[str, str], *, packages: bool = False) -> dict[str, Any]:
    """This machine, as a process with that environment sees it."""
    system = os.uname()
    memory = re.search(r"^MemTotal: +(\d+) kB$", proc_text("/proc/meminfo"), re.MULTILINE)
    threads = environ.get("OMP_NUM_THREADS", "")
    machine = {
        "host": system.nodename,
        "cpu": _processor(proc_text("/proc/cpuinfo")) or system.machine,
        "cpus": os.cpu_count() or 0,
        "usable_cpus": cores.render(os.sched_getaffinity(0)),
        "cores_of_ranks": environ.get("DRAY_CORES", ""),
        "threads": int(threads) if threads.isdecimal() else None,
        "numa": [proc_text(path).strip() for path in _numbered("/sys/devices/system/node/node[0-9]*/cpulist")],
        "memory_gb": round(int(memory[1]) * 1024 / 1e9, 1) if memory else None,
        "kernel": f"{system.sysname} {system.release}",
        "libc": os.confstr("CS_GNU_LIBC_VERSION") or "",
        "python": sys.version.partition(" ")[0],
        "gpus": _gpus(accelerator),
        "driver": node.driver(accelerator) or "",
    }
    return {**machine, "packages": versions()} if packages else machine


def _processor(text: str) -> str:
    """Its model; ARM's have numbers alone."""
    named = re.search(r"^(?:model name|cpu|Processor)\s*: (.+)$", text, re.MULTILINE)
    parts = re.findall(r"^CPU (implementer|part)\s*: (\S+)$", text, re.MULTILINE)[:2]
    return named[1].strip() if named else " ".join(f"{name} {value}" for name, value in parts)


def _gpus(accelerator: str) -> list[str]:
    """By their makers' names, in the order of their addresses; also those that this job was not given."""
    files, pattern = _GPUS.get(accelerator, ("", ""))
    names = (re.search(pattern, proc_text(path), re.MULTILINE) for path in _numbered(files))
    return [name[1].strip() for name in names if name]


def versions() -> dict[str, str]:
    """This Python's packages, by their metadata's folders: to read each file would take a second on a network disk."""
    known: dict[str, str] = {}
    for folder in sys.path:
        for path in sorted(glob.glob(f"{glob.escape(folder or '.')}/*.dist-info")):
            package, _, version = os.path.basename(path).removesuffix(".dist-info").partition("-")
            known.setdefault(re.sub("[-_.]+", "-", package).lower(), version)
    return dict(sorted(known.items()))


def _numbered(pattern: str) -> list[str]:
    """Paths that differ in a number, in its order."""
    return sorted(glob.glob(pattern), key=lambda path: (len(path), path))
