"""The plan: everything that will happen, as data. Pure: what is not in the four inputs is not looked up."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dray import batch, binds, environ
from dray.errors import ConfigError
from dray.facts import Facts
from dray.spec.recipe import Recipe
from dray.spec.site import Site

NODE_RANK = "{node_rank}"  # the runner puts in each node's own number; a plan never bakes a rank

# Which variable tells a node who it is, by who started it.
_IDENTITY = {
    "slurm": {"node": "SLURM_NODEID", "nodes": "SLURM_STEP_NUM_NODES", "name": "SLURMD_NODENAME"},
    "local": {"node": "DRAY_NODE", "nodes": "DRAY_NODES", "name": "DRAY_NODE_NAME"},
}
_FIRST_PORT, _PORTS = 20000, 10000  # below Linux's ephemeral range (32768 up), where any client may sit on a port


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Node(_Model):
    """A node as the others reach it."""

    name: str
    address: str


class World(_Model):
    """Who takes part, and where they meet."""

    nodes: tuple[Node, ...]
    ranks_per_node: int
    size: int
    master: str
    port: int
    meet_within: int
    identity: dict[Literal["node", "nodes", "name"], str]


class Plan(_Model):
    """One run, ready to be rendered and started. The runner and the trainer read it as plan.json."""

    version: Literal[1] = 1
    dray: str
    run: str
    folder: str
    engine: Literal["apptainer", "singularity", "docker", "bare"]
    image: str
    variant: str
    user: str
    world: World
    batch: dict[Literal["global_size", "per_device", "accumulation"], int]
    launcher: tuple[str, ...]
    command: tuple[str, ...]
    env: tuple[environ.Variable, ...]
    binds: tuple[binds.Bind, ...]
    reasons: dict[str, str]
    recipe: Recipe


def port_of(job: int) -> int:
    """A port that another job on the same nodes will hardly have."""
    return _FIRST_PORT + job % _PORTS


def plan(recipe: Recipe, site: Site, facts: Facts, *, run: str, folder: PurePosixPath, dray: str) -> Plan:
    """Decide everything, with the reason of every automatic choice."""
    hosts = facts.hosts()
    nodes = tuple(Node(name=host, address=facts.address or host) for host in hosts)
    ranks_per_node, ranks_why = _ranks_per_node(recipe, facts)
    port, port_why = _port(recipe, facts)
    size = len(nodes) * ranks_per_node
    shares = batch.divide(recipe.batch, world_size=size)
    reasons = {
        "nodes": f"{len(nodes)}: "
        + (
            "the scheduler gave them"
            if len(nodes) == recipe.nodes
            else f"given, though the recipe asks for {recipe.nodes}"
        ),
        "ranks_per_node": ranks_why,
        "master": f"{nodes[0].name}: the first of {facts.nodelist}",
        "port": port_why,
        "batch": f"{recipe.batch.global_size} = {shares.per_device} a device x {shares.accumulation} x {size} ranks",
    }
    python = facts.image if facts.engine == "bare" else "python3"
    world = World(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        size=size,
        master=nodes[0].address,
        port=port,
        meet_within=recipe.meet_within,
        identity=_IDENTITY[facts.scheduler],
    )
    return Plan(
        dray=dray,
        run=run,
        folder=str(folder),
        engine=facts.engine,
        image=facts.image,
        variant=recipe.image,
        user=f"{facts.uid}:{facts.gid}",
        world=world,
        batch={
            "global_size": recipe.batch.global_size,
            "per_device": shares.per_device,
            "accumulation": shares.accumulation,
        },
        launcher=_torchrun(world, python=python),
        command=(python, "-m", "dray.train", str(folder / "plan.json")),
        env=environ.resolve(recipe, site, facts, run_id=run, ranks_per_node=ranks_per_node),
        binds=binds.resolve(recipe, site, folder=folder),
        reasons=reasons,
        recipe=recipe,
    )


def _ranks_per_node(recipe: Recipe, facts: Facts) -> tuple[int, str]:
    if facts.gpus_per_node:
        return facts.gpus_per_node, f"{facts.gpus_per_node}: one for each GPU that the scheduler gave"
    if recipe.image != "cpu":
        raise ConfigError(
            f"a {recipe.image} run needs GPUs, and the scheduler gave none",
            wanted="at least one GPU on each node",
            found="0 GPUs on a node",
            fix="add --gpus-per-node=N (some sites want --gres=gpu:N) to the command",
        )
    if recipe.ranks_per_node:
        return recipe.ranks_per_node, f"{recipe.ranks_per_node}: the recipe says so, and no GPUs were given"
    return 1, "1: neither GPUs nor ranks_per_node were given"


def _port(recipe: Recipe, facts: Facts) -> tuple[int, str]:
    if recipe.port:
        return recipe.port, f"{recipe.port}: the recipe says so"
    if facts.port:
        return facts.port, f"{facts.port}: free on the first node when probed"
    port = port_of(facts.job)
    return port, f"{port}: from job number {facts.job}, not probed"


def _torchrun(world: World, *, python: str) -> tuple[str, ...]:
    # The static rendezvous: c10d gives ranks to nodes in the order they come, so ranks would not follow the plan.
    # --no-python: the runner's rank keeper starts the command itself and keeps its log and its exit code.
    return (
        python,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend=static",
        f"--nnodes={len(world.nodes)}",
        f"--nproc-per-node={world.ranks_per_node}",
        "--node-rank",
        NODE_RANK,
        f"--master-addr={world.master}",
        f"--master-port={world.port}",
        "--max-restarts=0",
        "--no-python",
    )
