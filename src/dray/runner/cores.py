"""Which cores each rank of this node gets: a share of those that the node has, near its GPU where that can be told."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dray.contract.cores import parse

_DISPLAYS = ("0x0300", "0x0302", "0x0380", "0x1200")  # PCI classes of GPUs: display, 3D, other, accelerator
_VENDORS = ("0x10de", "0x1002")


def shares(ranks: int, world: Mapping[str, Any], environ: Mapping[str, str], sys: str = "/sys") -> list[list[int]]:
    """The cores of each local rank; none where it cannot be told which are this job's."""
    allowed = sorted(os.sched_getaffinity(0))
    given = environ.get(world["identity"]["cpus"], "")
    # Where nothing confines a job to its CPUs, it sees all of them, and cannot know which are its own.
    if len(allowed) < ranks or (given.isdigit() and int(given) < len(allowed)):
        return []
    site = [parse(str(mask)) for mask in world["cores"]]
    if len(site) == ranks and set(allowed) >= {core for mask in site for core in mask}:
        return site
    return split(allowed, ranks, _nodes(sys), _gpus(sys))


def split(
    allowed: Sequence[int], ranks: int, nodes: Mapping[int, Sequence[int]], gpus: Sequence[int]
) -> list[list[int]]:
    """Even shares in the order of the memory they are next to; beside their GPUs, where each rank has one of all."""
    near = {number: [core for core in cores if core in set(allowed)] for number, cores in nodes.items()}
    if len(gpus) == ranks and all(len(near.get(node, ())) >= gpus.count(node) for node in gpus):
        return [_part(near[node], gpus[:rank].count(node), gpus.count(node)) for rank, node in enumerate(gpus)]
    named = [core for cores in near.values() for core in cores]
    ordered = [*named, *(core for core in allowed if core not in set(named))]
    return [_part(ordered, rank, ranks) for rank in range(ranks)]


def _part(cores: Sequence[int], number: int, parts: int) -> list[int]:
    size = len(cores) // parts
    return list(cores[number * size : (number + 1) * size])


def _nodes(sys: str) -> dict[int, list[int]]:
    """The cores of each NUMA node, a core's two threads side by side."""
    found = {}
    for path in glob.glob(f"{sys}/devices/system/node/node[0-9]*"):
        cores = parse(_read(f"{path}/cpulist"))
        found[int(path.rpartition("node")[2])] = [core for _, core in sorted((_first_thread(c, sys), c) for c in cores)]
    return dict(sorted(found.items()))


def _first_thread(core: int, sys: str) -> int:
    return min(parse(_read(f"{sys}/devices/system/cpu/cpu{core}/topology/thread_siblings_list")), default=core)


def _gpus(sys: str) -> list[int]:
    """The NUMA node of each GPU of this machine, in the order of the bus, which is that of CUDA and of ROCm."""
    found = []
    for path in sorted(glob.glob(f"{sys}/bus/pci/devices/*")):
        if _read(f"{path}/class")[:6] in _DISPLAYS and _read(f"{path}/vendor").strip() in _VENDORS:
            found.append(int(_read(f"{path}/numa_node") or -1))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
