"""The cores of each rank: an equal share of the job's cores on this node, near the rank's GPU if that is known.

A core is the list of its threads, by the numbers that Linux gives them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from dray.contract.cores import parse, render

Core = Sequence[int]

_DISPLAYS = ("0x0300", "0x0302", "0x0380", "0x1200")  # PCI classes of GPUs: display, 3D, other, accelerator
_VENDORS = ("0x10de", "0x1002")


def shares(ranks: int, world: Mapping[str, Any], environ: Mapping[str, str], sys: str = "/sys") -> list[list[Core]]:
    """The cores of each local rank; empty if it is not known which cores are this job's."""
    allowed = sorted(os.sched_getaffinity(0))
    cores = physical(allowed, sys)
    given = environ.get(world["identity"]["cpus"], "")
    # A job that is not confined to its CPUs sees all of them, and cannot know its own. If Slurm's count equals the
    # physical cores, the job has them all: with --hint=nomultithread Slurm counts no second threads, the cpuset does.
    confined = not given.isdigit() or int(given) >= len(allowed) or int(given) == len(cores)
    if len(allowed) < ranks or not confined:
        return []
    site = [parse(str(mask)) for mask in world["cores"]]
    if len(site) == ranks and set(allowed) >= {thread for mask in site for thread in mask}:
        return [physical(mask, sys) for mask in site]
    if len(cores) < ranks:
        cores = [[thread] for core in cores for thread in core]
    return split(cores, ranks, _nodes(sys), _gpus(sys))


def placed(world: Mapping[str, Any], environ: Mapping[str, str], sys: str = "/sys") -> dict[str, str]:
    """DRAY_CORES, the share of cores to which each rank supervisor moves; and OMP_NUM_THREADS, unless it is set."""
    own = shares(world["ranks_per_node"], world, environ, sys)
    given = environ.get(world["identity"]["cpus"], "")
    cpus = [sum(map(len, share)) for share in own]
    whole = any(len(core) > 1 for share in own for core in share)
    if whole and given.isdigit() and int(given) < sum(cpus):  # Slurm counts cores, and so do OpenMP's threads
        cpus = list(map(len, own))
    count = min(cpus) if own else int(given if given.isdigit() else 1) // world["ranks_per_node"]
    found = {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, count))}
    if own:
        found["DRAY_CORES"] = ";".join(render(chain.from_iterable(share)) for share in own)
    told, ranks = found.get("DRAY_CORES", "not bound"), world["ranks_per_node"]
    told += " (whole cores, with all their threads)" * whole
    if not own and given.isdigit() and int(given) < ranks:
        told += f" ({given} for {ranks} ranks: ask for more with --cpus-per-task)"
    print(f"dray: cores of each rank: {told}; OMP_NUM_THREADS={found['OMP_NUM_THREADS']}", flush=True)
    return found


def physical(threads: Sequence[int], sys: str = "/sys") -> list[Core]:
    """The cores of these threads, each with its threads."""
    cores: dict[int, list[int]] = {}
    for thread in threads:
        cores.setdefault(_first_thread(thread, sys), []).append(thread)
    return list(cores.values())


def split(
    cores: Sequence[Core], ranks: int, nodes: Mapping[int, Sequence[int]], gpus: Sequence[int]
) -> list[list[Core]]:
    """Equal shares in the order of NUMA nodes; beside the ranks' GPUs, if there is one GPU for each rank."""
    near = {number: [core for core in cores if core[0] in set(threads)] for number, threads in nodes.items()}
    if len(gpus) == ranks and all(len(near.get(node, ())) >= gpus.count(node) for node in gpus):
        return [_part(near[node], gpus[:rank].count(node), gpus.count(node)) for rank, node in enumerate(gpus)]
    named = [core for beside in near.values() for core in beside]
    ordered = [*named, *(core for core in cores if core not in named)]
    return [_part(ordered, rank, ranks) for rank in range(ranks)]


def _part(cores: Sequence[Core], number: int, parts: int) -> list[Core]:
    size = len(cores) // parts
    return list(cores[number * size : (number + 1) * size])


def _nodes(sys: str) -> dict[int, list[int]]:
    """The threads of each NUMA node."""
    paths = glob.glob(f"{sys}/devices/system/node/node[0-9]*")
    found = {int(path.rpartition("node")[2]): parse(_read(f"{path}/cpulist")) for path in paths}
    return dict(sorted(found.items()))


def _first_thread(thread: int, sys: str) -> int:
    return min(parse(_read(f"{sys}/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")), default=thread)


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
