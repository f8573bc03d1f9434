"""The cores of each rank: an equal share of the job's cores on this node, near the rank's GPU if that is known.

A core is the list of its threads, by the numbers that Linux gives them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from itertools import chain

from dray.contract.node import proc_text
from dray.contract.ranges import LIMIT, parse, render
from dray.runner.log import say
from dray.runner.plan import Environ, World

Core = Sequence[int]

SYS = "/sys"
_CLASSES = ("0x03", "0x12")  # of PCI: displays, accelerators
_VENDORS = ("0x10de", "0x1002")


def placed(world: World, environ: Environ) -> dict[str, str]:
    """DRAY_CORES, the share of cores to which each rank supervisor moves; and OMP_NUM_THREADS, unless it is set."""
    ranks, count = world.ranks_per_node, int(environ.get(world.identity.cpus) or 0)
    per_rank = shares(world, count)
    threads = [[*chain.from_iterable(share)] for share in per_rank]
    bound = ";".join(map(render, threads))
    text, omp = bound or "not bound", count // ranks
    if bound:  # where Slurm counts cores, so do OpenMP's threads
        omp = min(map(len, per_rank if 0 < count < sum(map(len, threads)) else threads))
    elif 0 < count < ranks:
        text += f" ({count} for {ranks} ranks: ask for more with --cpus-per-task)"
    threads_of_rank = environ.get("OMP_NUM_THREADS") or str(max(1, omp))
    say(f"cores of each rank: {text}; OMP_NUM_THREADS={threads_of_rank}")
    return {"OMP_NUM_THREADS": threads_of_rank, "DRAY_CORES": bound}


def shares(world: World, count: int) -> list[list[Core]]:
    """The cores of each local rank; empty if it is not known which are this job's. `count` is Slurm's; 0: unknown."""
    ranks, allowed = world.ranks_per_node, sorted(os.sched_getaffinity(0))
    cores = physical(allowed)
    # A job that is not confined to its CPUs sees all of them, and cannot know its own. If Slurm's count equals the
    # physical cores, the job has them all: with --hint=nomultithread Slurm counts no second threads, the cpuset does.
    if len(allowed) < ranks or (0 < count < len(allowed) and count != len(cores)):
        return []
    site = [*map(parse, world.cores)]
    if len(site) == ranks and set(allowed).issuperset(chain.from_iterable(site)):
        return [physical(mask) for mask in site]
    if len(cores) < ranks:
        cores = [[thread] for thread in chain.from_iterable(cores)]
    return split(cores, ranks, _homes(), _gpus())


def physical(threads: Sequence[int]) -> list[Core]:
    """The cores of these threads, each with its threads."""
    cores: dict[int, list[int]] = {}
    for thread in threads:
        siblings = parse(proc_text(f"{SYS}/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"))
        cores.setdefault(min(siblings, default=thread), []).append(thread)
    return [*cores.values()]


def split(cores: Sequence[Core], ranks: int, homes: Mapping[int, int], gpus: Sequence[int]) -> list[list[Core]]:
    """Equal shares in the order of NUMA nodes; if there is one GPU for each rank, of the cores next to it.

    `homes` has the NUMA node of each thread, `gpus` that of each GPU.
    """
    near = {node: [core for core in cores if homes.get(core[0]) == node] for node in gpus}
    if len(gpus) == ranks and all(len(near[node]) >= gpus.count(node) for node in gpus):
        shares = {node: iter(split(near[node], gpus.count(node), homes, ())) for node in near}
        return [next(shares[node]) for node in gpus]
    ordered = sorted(cores, key=lambda core: homes.get(core[0], LIMIT))
    size = len(ordered) // ranks
    return [ordered[rank * size : (rank + 1) * size] for rank in range(ranks)]


def _homes() -> dict[int, int]:
    """The NUMA node of each thread."""
    homes: dict[int, int] = {}
    for path in glob.glob(f"{SYS}/devices/system/node/node[0-9]*"):
        homes |= dict.fromkeys(parse(proc_text(f"{path}/cpulist")), int(path.rpartition("node")[2]))
    return homes


def _gpus() -> list[int]:
    """The NUMA node of each GPU of this machine, in the order of the bus, which is that of CUDA and of ROCm."""
    nodes = []
    for path in sorted(glob.glob(f"{SYS}/bus/pci/devices/*")):
        if proc_text(f"{path}/class").startswith(_CLASSES) and proc_text(f"{path}/vendor").strip() in _VENDORS:
            nodes.append(int(proc_text(f"{path}/numa_node") or -1))
    return nodes
