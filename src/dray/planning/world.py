"""The nodes of a run, the ranks on each of them, the port of the rendezvous, and each rank's share of the batch."""

from __future__ import annotations

import hashlib
import math

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import Batch
from dray.contract.findings import ConfigError, UnfitError, counted
from dray.facts import Facts
from dray.planning.schema import Choice, Identity, Node, World

# Which variable tells a node who it is and what it has, by who started it.
_LOCAL: dict[Identity, str] = {
    "node": "DRAY_NODE",
    "nodes": "DRAY_NODES",
    "name": "DRAY_NODE_NAME",
    "cpus": "DRAY_CPUS",
    "image": "DRAY_IMAGE_ID",
}
SLURM: dict[Identity, str] = {
    "node": "SLURM_NODEID",
    "nodes": "SLURM_STEP_NUM_NODES",
    "name": "SLURMD_NODENAME",
    "cpus": "SLURM_CPUS_ON_NODE",
    "image": "DRAY_IMAGE_ID",
}
# What a task of srun has and programs read. With SLURM_STEP_ID Open MPI 4 would take each rank for a task of srun that
# lacks PMI, and end it.
_TASK = (
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME", "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_ON_NODE", "SLURM_JOBID", "SLURM_JOB_ACCOUNT", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_END_TIME",
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION",
    "SLURM_JOB_START_TIME", "SLURM_JOB_USER", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID", "SLURM_NNODES",
    "SLURM_NODELIST", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_RESTART_COUNT",
    "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_SUBMIT_DIR",
    "SLURM_TASKS_PER_NODE",
)  # fmt: skip
# What to type where the scheduler gave no GPU, or none was asked for before there is a job.
_MORE_GPUS = {
    "slurm": "add --gpus-per-node=N (some sites want --gres=gpu:N) to sbatch",
    "login": 'add --gpus-per-node N; if sbatch wants --gres, set gpu_option = "gres" in a site file (docs/launch.md)',
    "local": "add --gpus-per-node N, or train without GPUs: image=cpu",
    "hosts": "add slots=N to each line of the hostfile, or --gpus-per-node N",
}
_FIRST_PORT, _PORTS = 20000, 10000  # below Linux's ephemeral range (32768 up), where any client may sit on a port


def port_of(run: str) -> int:
    """A port made from the run's name, so that every machine has the same one."""
    return _FIRST_PORT + int(hashlib.sha256(run.encode()).hexdigest()[:6], 16) % _PORTS


def select(recipe: Recipe, facts: Facts) -> Facts:
    """The facts with the nodes that take part: all but the spare ones; fewer once nodes failed and no spare is left."""
    if facts.scheduler != "slurm" or facts.login or not (recipe.spares or facts.lost):
        return facts
    hosts = facts.hosts()
    left = [host for host in hosts if host not in facts.lost]
    whole = len(hosts) - recipe.spares
    if whole < 1:
        raise ConfigError(
            "all nodes of the job would be spare nodes",
            wanted=f"more than {counted(recipe.spares, 'node')}, since spares = {recipe.spares} take no part at first",
            found=counted(len(hosts), "node"),
            fix=f"sbatch --nodes={recipe.spares + 1} or more, or spares=0",
        )
    count = whole
    if len(left) < whole:
        count = fewer(recipe, ranks_per_node(recipe, facts).value, len(left))
    if not count:
        raise UnfitError(
            "no spare node is left",
            wanted=counted(whole, "node"),
            found=f"{' '.join(left) or 'none'}; {' '.join(facts.lost)} failed before",
            fix="submit again, with more spares, or with min_nodes (docs/survive.md)",
        )
    chosen = {"nodelist": ",".join(left[:count]), "nodes": count, "missing": whole - count}
    return facts.model_copy(update={**chosen, "spares": tuple(left[count:])})


def fewer(recipe: Recipe, ranks_per_node: int, left: int) -> int:
    """The most of the `left` nodes that divide the global batch, in whole groups of train.fsdp_shard; 0 if too few."""
    if not recipe.min_nodes:
        return 0
    shard = recipe.train.fsdp_shard if recipe.train else "auto"
    group = shard if isinstance(shard, int) else 1
    for count in range(left - left % group, recipe.min_nodes - 1, -group):
        if not recipe.batch or recipe.batch.global_size % (count * ranks_per_node) == 0:
            return count
    return 0


def decide(recipe: Recipe, site: Site, facts: Facts) -> tuple[World, dict[str, str]]:
    """The world of a run, and the reasons of the choices by name."""
    hosts, ranks, port = facts.hosts(), ranks_per_node(recipe, facts), _port(recipe, facts)
    nodes = f"{len(hosts)}: from the scheduler"
    if len(hosts) != recipe.nodes:
        nodes += f"; the recipe has nodes = {recipe.nodes}"
    if (recipe.spares or facts.lost) and not facts.login:
        nodes += f"; spare: {' '.join(facts.spares) or 'none'}"
    if facts.lost:
        nodes += f"; failed: {' '.join(facts.lost)}"
    if facts.missing:
        nodes += f"; {facts.missing} fewer than at first (min_nodes = {recipe.min_nodes})"
    interfaces = f", at its address on {' or '.join(site.interfaces)} (site {site.name})" if site.interfaces else ""
    reasons = {
        "nodes": nodes,
        "ranks_per_node": f"{ranks.value}: {ranks.why}",
        "master": f"{hosts[0]}: the first of {facts.nodelist}{interfaces}",
        "port": f"{port.value or 'any'}: {port.why}",
        "cores": f"{' '.join(site.cores)}: site {site.name}, whose jobs have whole nodes"
        if site.cores
        else "each node divides its own among its ranks",
    }
    world = World(
        nodes=tuple(Node(name=host, address=facts.address or host) for host in hosts),
        ranks_per_node=ranks.value,
        size=len(hosts) * ranks.value,
        master=facts.address or hosts[0],
        port=port.value,
        interfaces=site.interfaces,
        rendezvous_timeout_s=recipe.rendezvous_timeout_s,
        max_restarts=recipe.max_restarts,
        spares=facts.spares,
        cores=site.cores,
        one_machine=facts.scheduler == "local",
        shared_folder=facts.scheduler != "hosts",
        identity=SLURM if facts.scheduler == "slurm" else _LOCAL,
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


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})


def divide(batch: Batch, *, world_size: int, at_first: int = 0) -> Batch:
    """Divide the global batch exactly among the ranks, and fill in what the recipe leaves open.

    If there were more ranks `at_first`, each takes no more rows at a time than it did then.
    """
    size, each, steps = batch.global_size, batch.per_device, batch.gradient_accumulation_steps
    if at_first > world_size and size % world_size == 0:
        before, rows = divide(batch, world_size=at_first).per_device or 1, size // world_size
        each = max(count for count in divisors(rows) if count <= before)
        steps = rows // each
    fixed = world_size * (each or 1) * (steps or 1)
    rest = size // fixed
    sizes = [fixed] if each and steps else [rest * fixed, rest * fixed + fixed]
    if size not in sizes:
        raise ConfigError(
            f"global batch {size} is not divisible by {counted(world_size, 'rank')}",
            where="recipe [batch]",
            wanted="global_size = per_device x gradient_accumulation_steps x ranks",
            found=f"{size} = {each or '?'} x {steps or '?'} x {world_size}",
            fix=f"set batch.global_size to {' or '.join(str(number) for number in sizes if number)}, "
            "or change another of the factors",
        )
    steps = steps or (rest if each else 1)
    return batch.model_copy(update={"per_device": each or rest, "gradient_accumulation_steps": steps})
