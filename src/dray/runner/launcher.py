"""The launcher on this node: its argv, its variables, and the cores of each rank that it starts."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain

from dray.contract import heartbeat
from dray.contract.node import proc_text
from dray.contract.node_start import is_early
from dray.contract.ranges import LIMIT, parse, render
from dray.runner import say
from dray.runner.connections import Restart
from dray.runner.plan import Endpoint, Environ, Plan, World

Core = Sequence[int]
"""A core's threads, by the numbers that Linux gives them."""

SYS = "/sys"
_CLASSES = ("0x03", "0x12")  # of PCI: displays, accelerators
_VENDORS = ("0x10de", "0x1002")
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def argv(plan: Plan, host: str, port: int) -> list[str]:
    """The launcher's argv with this node's values filled in, then the rank supervisor, then the command."""
    values = {
        "{node_rank}": str(plan.me),
        "{master}": host,
        "{port}": str(port),
        "{endpoint}": f"{host}:{port}",
        "{ranks}": f"{_FOLDER}/ranks.py",
    }
    launcher = [values.get(word, word) for word in plan.launcher]
    rank = [sys.executable, "-S", "-E", f"{_FOLDER}/rank.py"]  # it needs no site-packages
    return [*launcher, *rank, plan.folder, str(plan.world.size), plan.name, *plan.command]


def set_variables(plan: Plan) -> None:
    """Set the plan's variables in this process. What the node has handed in stays: what starts a container needs
    (`is_early`), and the job's own values of `pass_env`."""
    passed = os.environ.keys() & plan.pass_env
    for name, value in plan.env:
        if name not in passed and not is_early(name):
            os.environ[name] = value


def environment(plan: Plan, store: Endpoint, start: Restart, gloo: Environ) -> dict[str, str]:
    """The variables on this node, with the store at this address and port."""
    most = plan.world.max_restarts
    found = {
        # Where nobody has set another; torchrun and torch leave files in the first.
        "TMPDIR": plan.scratch,
        **gloo,
        **os.environ,
        **core_variables(plan.world, os.environ),
        # What joins the store: dray.tcp_store.handler in torchrun and accelerate, torch itself in other ranks.
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "GROUP_RANK": str(plan.me),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Under every launcher, as torchrun has it: else Lightning takes a rank for a task of srun, and puts the job
        # back into the queue itself.
        "TORCHELASTIC_RUN_ID": plan.run,
        heartbeat.FOLDER: plan.scratch,
    }
    if most:  # the launcher, which starts ranks once, would tell them another number
        found["DRAY_RESTARTS"] = f"{start.number}/{most}"
    return found


def core_variables(world: World, environ: Environ) -> dict[str, str]:
    """DRAY_CORES, the share of cores to which each rank supervisor moves; and OMP_NUM_THREADS, unless it is set."""
    ranks, count = world.ranks_per_node, int(environ.get(world.identity.cpus) or 0)
    per_rank = core_shares(world, count)
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


def core_shares(world: World, count: int) -> list[list[Core]]:
    """The cores of each local rank; empty if it is not known which are this job's. `count` is Slurm's; 0: unknown."""
    ranks, allowed = world.ranks_per_node, sorted(os.sched_getaffinity(0))
    cores = physical_cores(allowed)
    # A job that is not confined to its CPUs sees all of them, and cannot know its own. If Slurm's count equals the
    # physical cores, the job has them all: with --hint=nomultithread Slurm counts no second threads, the cpuset does.
    if len(allowed) < ranks or (0 < count < len(allowed) and count != len(cores)):
        return []
    site = [*map(parse, world.cores)]
    if len(site) == ranks and set(allowed).issuperset(chain.from_iterable(site)):
        return [physical_cores(mask) for mask in site]
    if len(cores) < ranks:
        cores = [[thread] for thread in chain.from_iterable(cores)]
    return split_cores(cores, ranks, _homes(), _gpus())


def physical_cores(threads: Sequence[int]) -> list[Core]:
    """The cores of these threads, each with its threads."""
    cores: dict[int, list[int]] = {}
    for thread in threads:
        siblings = parse(proc_text(f"{SYS}/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"))
        cores.setdefault(min(siblings, default=thread), []).append(thread)
    return [*cores.values()]


def split_cores(cores: Sequence[Core], ranks: int, homes: Mapping[int, int], gpus: Sequence[int]) -> list[list[Core]]:
    """Equal shares in the order of NUMA nodes; if there is one GPU for each rank, of the cores next to it.

    `homes` has the NUMA node of each thread, `gpus` that of each GPU.
    """
    near = {node: [core for core in cores if homes.get(core[0]) == node] for node in gpus}
    if len(gpus) == ranks and all(len(near[node]) >= gpus.count(node) for node in gpus):
        shares = {node: iter(split_cores(near[node], gpus.count(node), homes, ())) for node in near}
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
