"""Hardware: what a machine is, for capsules, and the makers' figures of GPUs, from gpus.toml with its sources."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from dray.contract import node, ranges
from dray.contract.node import proc_text

_GPUS = {
    "cuda": ("/proc/driver/nvidia/gpus/*/information", "^Model:(.+)$"),
    "rocm": ("/sys/class/drm/card[0-9]*/device/product_name", "(.+)"),
}


class Gpu(NamedTuple):
    """A GPU, with its maker's figures."""

    name: str
    """A regular expression for the whole name that torch reports."""
    fp16: float
    """TFLOP/s of dense matrix products in fp16."""
    bf16: float
    """The same in bf16; 0 where the GPU emulates it."""
    bandwidth: float
    """Memory bandwidth, in GB/s."""
    source: str


def look(accelerator: str, environ: Mapping[str, str], *, packages: bool = False) -> dict[str, Any]:
    """This machine as a process with that environment sees it: processor, memory, kernel, GPUs, this Python's packages.

    Read from /proc and /sys alone; what cannot be read is left empty. A run on another machine cannot have it the same,
    and a capsule says so.
    """
    system = os.uname()
    memory = re.search(r"^MemTotal: +(\d+) kB$", proc_text("/proc/meminfo"), re.MULTILINE)
    threads = environ.get("OMP_NUM_THREADS", "")
    machine = {
        "host": system.nodename,
        "cpu": _processor(proc_text("/proc/cpuinfo")) or system.machine,
        "cpus": os.cpu_count() or 0,
        "usable_cpus": ranges.render(os.sched_getaffinity(0)),
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


def versions() -> dict[str, str]:
    """This Python's packages, by their metadata's folders: to read each file would take a second on a network disk."""
    known: dict[str, str] = {}
    for folder in sys.path:
        for path in sorted(glob.glob(f"{glob.escape(folder or '.')}/*.dist-info")):
            package, _, version = os.path.basename(path).removesuffix(".dist-info").partition("-")
            known.setdefault(re.sub("[-_.]+", "-", package).lower(), version)
    return dict(sorted(known.items()))


def find_gpu(device: str) -> Gpu | None:
    """The GPU with this name; None if it is a part of a GPU, or not listed."""
    return next((gpu for gpu in known_gpus() if re.fullmatch(gpu.name, device)), None)


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """All that gpus.toml has."""
    import tomllib  # noqa: PLC0415  the runner on each node imports this file, and asks for no figures

    with open(f"{os.path.dirname(__file__)}/gpus.toml", "rb") as file:
        return tuple(Gpu(**gpu) for gpu in tomllib.load(file)["gpu"])


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


def _numbered(pattern: str) -> list[str]:
    """Paths that differ in a number, in its order."""
    return sorted(glob.glob(pattern), key=lambda path: (len(path), path))
