"""The plan: everything that will happen, as data. Pure: what is not in the four inputs is not looked up."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dray import engines
from dray.config.image import ACCELERATORS
from dray.config.recipe import Preflight, Recipe
from dray.config.site import Fabric, Site
from dray.config.training import Batch
from dray.contract import run_folder as names
from dray.contract.findings import ConfigError
from dray.facts import Engine, Facts
from dray.planning import batch, binds, environment, launchers, world
from dray.planning.world import SLURM, World

# By which Slurm says whose GPUs a job has, where nothing else keeps it from the others'. ROCm reads CUDA's name too,
# and numbers anew what is left: of two such lists the second would name GPUs that are not there.
_VISIBLE = {"cpu": (), "cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("ROCR_VISIBLE_DEVICES",)}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Plan(_Model):
    """One run, ready to be rendered and started. The runner and the trainer read it as plan.json."""

    version: Literal[1] = 1
    dray: str
    run: str
    run_folder: str
    attempt: int
    folder: str
    """Of this attempt; the checkpoints of all of them are in the run's."""
    engine: Engine
    image: str
    image_sha256: str
    stage: str
    variant: str
    site: str
    sbatch: tuple[str, ...]
    fabric: Fabric
    preflight: Preflight | None
    user: str
    world: World
    batch: Batch | None
    launcher: tuple[str, ...]
    command: tuple[str, ...]
    where: str
    files: dict[str, str]
    env: tuple[environment.Variable, ...]
    pass_env: tuple[str, ...]
    left_outside: tuple[str, ...]
    binds: tuple[binds.Bind, ...]
    reasons: dict[str, str]
    recipe: Recipe

    @property
    def by_slurm(self) -> bool:
        """Whether Slurm starts the nodes."""
        return self.world.identity == SLURM


def plan(
    recipe: Recipe,
    site: Site,
    facts: Facts,
    *,
    run_folder: PurePosixPath,
    attempt: int = 1,
    dray: str,
    site_why: str = "given",
) -> Plan:
    """Decide everything, with the reason of every automatic choice."""
    run, folder, engine = run_folder.name, run_folder / names.attempt(attempt), engines.get(facts.engine)
    _refuse_other_gpus(recipe, site)
    _refuse_parted_checkpoints(recipe, facts)
    hosts = facts.hosts()
    nodes = tuple(world.Node(name=host, address=facts.address or host) for host in hosts)
    ranks_per_node, ranks_why = world.ranks_per_node(recipe, facts)
    port, port_why = world.port(recipe, facts)
    size = len(nodes) * ranks_per_node
    shares = batch.divide(recipe.batch, world_size=size) if recipe.batch else None
    reasons = {
        "site": f"{site.name}: {site_why}",
        "nodes": f"{len(nodes)}: "
        + (
            "the scheduler gave them"
            if len(nodes) == recipe.nodes
            else f"given, though the recipe asks for {recipe.nodes}"
        ),
        "ranks_per_node": ranks_why,
        "master": f"{nodes[0].name}: the first of {facts.nodelist}"
        + (f", at its address on {' or '.join(site.interfaces)} (site {site.name})" if site.interfaces else ""),
        "port": port_why,
        "store": f"torch's, on that port of the first node; {launchers.of(recipe.launcher).store}",
        "preflight": f"all ranks, within {recipe.preflight.within} s once they have met"
        if _preflight(recipe, facts)
        else f"none (preflight.when is {recipe.preflight.when})",
        "cores": f"{' '.join(site.cores)}: site {site.name}, where a job has whole nodes"
        if site.cores
        else "each node shares out its own",
        "fabric": site.why.get("fabric", f"site {site.name}"),
    }
    if shares:
        product = f"{shares.per_device} a device x {shares.gradient_accumulation_steps} x {size} ranks"
        reasons["batch"] = f"{shares.global_size} = {product}"
    if recipe.train:
        reasons["training"] = _training(recipe)
    python = engine.python(facts.image)
    launcher = launchers.of(recipe.launcher)
    job = launchers.Job(
        python=python,
        folder=str(folder),
        hosts=hosts,
        each=ranks_per_node,
        max_restarts=recipe.max_restarts,
        accelerate=recipe.accelerate,
    )
    everyone = world.World(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        size=size,
        master=nodes[0].address,
        port=port,
        interfaces=site.interfaces,
        rendezvous_timeout_s=recipe.rendezvous_timeout_s,
        cores=site.cores,
        one_machine=facts.scheduler == "local",
        shared_folder=facts.scheduler != "hosts",
        identity=world.IDENTITY[facts.scheduler],
    )
    env = environment.resolve(recipe, site, facts, run_id=run)
    visible = (name for name in _VISIBLE[ACCELERATORS[recipe.image]] if name not in recipe.env)
    passed = tuple(dict.fromkeys((*recipe.pass_env, *visible)))
    return Plan(
        dray=dray,
        run=run,
        run_folder=str(run_folder),
        attempt=attempt,
        folder=str(folder),
        engine=facts.engine,
        image=facts.image,
        image_sha256=facts.image_sha256,
        stage=site.stage if engine.image == "file" and engine.script_mounts else "",
        variant=recipe.image,
        site=f"site {site.name}",
        sbatch=site.sbatch,
        fabric=_fabric(site, facts),
        preflight=_preflight(recipe, facts),
        user=f"{facts.uid}:{facts.gid}",
        world=everyone,
        batch=shares,
        launcher=launcher.argv(job),
        command=_command(recipe, python=python, folder=folder),
        where=recipe.command.folder if recipe.command else str(folder),
        files=launcher.files(job),
        env=env,
        pass_env=passed,
        left_outside=tuple(sorted(set(facts.environment) - {*passed, *(variable.name for variable in env)}))
        if engine.isolates_env
        else (),
        binds=binds.resolve(recipe, site, facts, run_folder=run_folder),
        reasons=reasons,
        recipe=recipe,
    )


def _refuse_other_gpus(recipe: Recipe, site: Site) -> None:
    mine, theirs = ACCELERATORS[recipe.image], ACCELERATORS[site.image or recipe.image]
    if mine not in ("cpu", theirs):
        raise ConfigError(
            f"the {recipe.image} image is not for this site's GPUs",
            where=f"site {site.name}: {site.about}",
            wanted=f"image={site.image}",
            found=f"image={recipe.image}",
            fix=f"set image={site.image}, or name another site",
        )


def _refuse_parted_checkpoints(recipe: Recipe, facts: Facts) -> None:
    """Each rank writes its part, and the first gives the whole its name: all must see the folder."""
    if facts.scheduler == "hosts" and facts.nodes > 1 and recipe.checkpoint.every and not recipe.checkpoint.folder:
        raise ConfigError(
            "checkpoints of several machines want a disk that all of them see",
            where="recipe [checkpoint]",
            wanted="checkpoint.folder on such a disk",
            found="checkpoint.every without it: each machine has a run folder of its own",
            fix="checkpoint.folder=/a/shared/folder, or checkpoint.every=[] to keep the last model alone",
        )


def _fabric(site: Site, facts: Facts) -> Fabric:
    """Only Apptainer puts the host's files into a container's library path; elsewhere the image must have all."""
    if site.fabric.strategy == "host" and not engines.get(facts.engine).host_libraries:
        return site.fabric.model_copy(update={"strategy": "none", "libraries": (), "plugin": ""})
    return site.fabric


def _preflight(recipe: Recipe, facts: Facts) -> Preflight | None:
    """Nodes that are one machine have no wire between them to prove."""
    several = facts.nodes > 1 and facts.scheduler != "local"
    wanted = {"always": True, "never": False, "several": several}[recipe.preflight.when]
    return recipe.preflight if wanted else None


def _training(recipe: Recipe) -> str:
    """What decides most of how it goes, a file of DeepSpeed's read in."""
    train, model = recipe.train, recipe.model
    assert train is not None
    length = f"{train.steps} steps" if train.steps else f"{train.epochs:g} epoch{'s' if train.epochs != 1 else ''}"
    offload = f", offload {train.offload}" if train.offload else ""
    words = model.tokenizer or model.name or "one for each byte"
    schedule = f"{train.lr_scheduler_type} from {train.lr:g}"
    return f"{length}, {train.strategy}{offload}, {train.precision}, {schedule}; tokens: {words}"


def _command(recipe: Recipe, *, python: str, folder: PurePosixPath) -> tuple[str, ...]:
    if recipe.command is None:
        return (python, "-m", "dray.train", str(folder / names.PLAN))
    argv = recipe.command.argv
    return (python, *argv) if argv[0].endswith(".py") else argv
