"""Decides the nodes of a run, the ranks on each of them, and the port of the rendezvous."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning.choice import Choice

_Identity = Literal["node", "nodes", "name", "cpus", "image"]
# Which variable tells a node who it is and what it has, by who started it.
_LOCAL: dict[_Identity, str] = {
    "node": "DRAY_NODE",
    "nodes": "DRAY_NODES",
    "name": "DRAY_NODE_NAME",
    "cpus": "DRAY_CPUS",
    "image": "DRAY_IMAGE_ID",
}
SLURM: dict[_Identity, str] = {
    "node": "SLURM_NODEID",
    "nodes": "SLURM_STEP_NUM_NODES",
    "name": "SLURMD_NODENAME",
    "cpus": "SLURM_CPUS_ON_NODE",
    "image": "DRAY_IMAGE_ID",
}
# What a task of srun has and programs read. With SLURM_STEP_ID Open MPI 4 would take each rank for a task of srun that
# lacks PMI, and end it.
_TASK = (
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME"),
    *("SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_JOBID", "SLURM_JOB_ACCOUNT", "SLURM_JOB_CPUS_PER_NODE"),
    *("SLURM_JOB_END_TIME", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"),
    *("SLURM_JOB_PARTITION", "SLURM_JOB_START_TIME", "SLURM_JOB_USER", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID"),
    *("SLURM_NNODES", "SLURM_NODELIST", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID"),
    *("SLURM_RESTART_COUNT", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_SUBMIT_DIR", "SLURM_TASKS_PER_NODE"),
)
_IDENTITY = {"slurm": SLURM, "local": _LOCAL, "hosts": _LOCAL}
# What to type where the scheduler gave no GPU, or none was asked for before there is a job.
_MORE_GPUS = {
    "slurm": "add --gpus-per-node=N (some sites want --gres=gpu:N) to sbatch",
    "login": 'add --gpus-per-node N; if sbatch wants --gres, set gpu_option = "gres" in a site file (docs/launch.md)',
    "local": "add --gpus-per-node N, or train without GPUs: image=cpu",
    "hosts": "add slots=N to each line of the hostfile, or --gpus-per-node N",
}
_FIRST_PORT, _PORTS = 20000, 10000  # below Linux's ephemeral range (32768 up), where any client may sit on a port


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Node(_Model):
    """A node as the others reach it."""

    name: str
    """The node's name in Slurm, or in the hostfile."""
    address: str
    """The name or the address at which the others reach it."""


class World(_Model):
    """The nodes and ranks of a run, and where the rendezvous is."""

    nodes: tuple[Node, ...]
    """The nodes that take part, in the order of their numbers."""
    ranks_per_node: int
    """How many ranks each node starts."""
    size: int
    """The world size: ranks of all nodes together."""
    master: str
    """The name or the address of the first node, which holds the rendezvous."""
    port: int
    """The port of the rendezvous; 0 where the first node chooses a free one and writes it to rendezvous.json."""
    interfaces: tuple[str, ...]
    """The site's network interfaces, on one of which the first node listens; empty: the route decides."""
    rendezvous_timeout_s: int
    """Seconds that a node waits for the others in the rendezvous."""
    max_restarts: int
    """How often the runners may start all ranks again within the job."""
    spares: tuple[str, ...]
    """Spare nodes of the job, which take no part until a node fails."""
    cores: tuple[str, ...]
    """The cores of each local rank, from the site's CPU map; empty: each node divides its own cores."""
    one_machine: bool
    """Whether all nodes are this machine."""
    shared_folder: bool
    """Whether all nodes see the run folder at the same place."""
    identity: dict[_Identity, str]
    """The variables in which a node finds its number, the number of nodes, its name, its cores and its image."""
    task: tuple[str, ...]
    """The variables of Slurm's task on a node that its ranks see too; none without Slurm."""


def port_of(run: str) -> int:
    """A port made from the run's name, so that every machine has the same one."""
    return _FIRST_PORT + int(hashlib.sha256(run.encode()).hexdigest()[:6], 16) % _PORTS


def decide(recipe: Recipe, site: Site, facts: Facts) -> tuple[World, dict[str, str]]:
    """The world of a run, and the reasons of the choices by name."""
    hosts = facts.hosts()
    ranks, chosen_port = ranks_per_node(recipe, facts), _port(recipe, facts)
    why_nodes = (
        "from the scheduler"
        if len(hosts) == recipe.nodes
        else f"from the scheduler; the recipe has nodes = {recipe.nodes}"
    )
    if (recipe.spares or facts.lost) and not facts.login:
        why_nodes += (
            f"; spare: {' '.join(facts.spares) or 'none'}{'; failed: ' * bool(facts.lost)}{' '.join(facts.lost)}"
        )
    why_nodes += f"; {facts.missing} fewer than at first (min_nodes = {recipe.min_nodes})" * bool(facts.missing)
    interfaces = f", at its address on {' or '.join(site.interfaces)} (site {site.name})" if site.interfaces else ""
    masks = f"{' '.join(site.cores)}: site {site.name}, whose jobs have whole nodes"
    reasons = {
        "nodes": f"{len(hosts)}: {why_nodes}",
        "ranks_per_node": f"{ranks.value}: {ranks.why}",
        "master": f"{hosts[0]}: the first of {facts.nodelist}{interfaces}",
        "port": f"{chosen_port.value or 'any'}: {chosen_port.why}",
        "cores": masks if site.cores else "each node divides its own among its ranks",
    }
    world = World(
        nodes=tuple(Node(name=host, address=facts.address or host) for host in hosts),
        ranks_per_node=ranks.value,
        size=len(hosts) * ranks.value,
        master=facts.address or hosts[0],
        port=chosen_port.value,
        interfaces=site.interfaces,
        rendezvous_timeout_s=recipe.rendezvous_timeout_s,
        max_restarts=recipe.max_restarts,
        spares=facts.spares,
        cores=site.cores,
        one_machine=facts.scheduler == "local",
        shared_folder=facts.scheduler != "hosts",
        identity=_IDENTITY[facts.scheduler],
        task=_TASK if facts.scheduler == "slurm" else (),
    )
    return world, reasons


def ranks_per_node(recipe: Recipe, facts: Facts) -> Choice[int]:
    """One for each GPU; without GPUs, as many as the recipe sets."""
    if recipe.launcher == "ray" and (facts.gpus_per_node or recipe.image == "cpu"):
        return Choice(1, "launcher = ray: Ray starts its workers itself")
    if facts.gpus_per_node and facts.scheduler == "hosts":
        return Choice(facts.gpus_per_node, "the hostfile's slots")
    if facts.gpus_per_node and recipe.gpus != "none":
        return Choice(facts.gpus_per_node, "one for each GPU that the scheduler gave")
    if recipe.image != "cpu":
        raise ConfigError(
            f"a {recipe.image} run needs GPUs, and the scheduler gave none",
            wanted="at least one GPU on each node",
            found="0 GPUs on a node",
            fix=_MORE_GPUS["login" if facts.login else facts.scheduler],
        )
    if recipe.ranks_per_node:
        return Choice(recipe.ranks_per_node, "set in the recipe, since no GPUs are used")
    return Choice(1, "the default, since no GPUs are used")


def _port(recipe: Recipe, facts: Facts) -> Choice[int]:
    if recipe.port:
        return Choice(recipe.port, "set in the recipe")
    if facts.port:
        return Choice(facts.port, "from the run's name, since machines of a hostfile share no folder")
    return Choice(0, "a free one, which the first node chooses and writes to rendezvous.json")
