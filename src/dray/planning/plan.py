"""Decide everything that will happen, as data. Pure: what is not in the inputs is not looked up."""

from __future__ import annotations

from pathlib import PurePosixPath

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import Batch
from dray.contract import run_folder as names
from dray.contract.findings import counted
from dray.facts import Facts, Files
from dray.planning import (
    accelerate,
    binds,
    environment,
    grace,
    image,
    launchers,
    rules,
    trainer_defaults,
    transport,
    world,
)
from dray.planning.schema import Plan

_ACCESS = {
    "none": "only this user, whatever the umask; runs.share = none",
    "group": "this user, and its group may read all but the secret; runs.share = group",
}


def plan(
    recipe: Recipe,
    site: Site,
    facts: Facts,
    files: Files | None = None,
    *,
    run_folder: PurePosixPath,
    scratch: str,
    attempt: int = 1,
    dray: str,
    site_why: str = "given",
) -> Plan:
    """Decide everything, with the reason of every automatic choice, and find what is wrong or unwise."""
    files, engine, folder = files or Files(), engines.get(facts.engine), str(run_folder / names.attempt(attempt))
    recipe, image_why = image.chosen(recipe, site, facts)
    ranks, world_reasons = world.decide(recipe, site, facts)
    shares: Batch | None = None
    training: dict[str, str] = {}
    if recipe.batch:
        at_first = (len(ranks.nodes) + facts.missing) * ranks.ranks_per_node
        shares = world.divide(recipe.batch, world_size=ranks.size, at_first=at_first)
        recipe, training = trainer_defaults.decide(recipe, shares, ranks, site=site, facts=facts, files=files)
        each, steps = shares.per_device, shares.gradient_accumulation_steps
        product = f"{each} per device x {steps} accumulation x {counted(ranks.size, 'rank')}"
        training = {"batch": f"{shares.global_size} = {product}", **training}
    fabric, preflight = transport.fabric(recipe, site, facts, engine), transport.preflight(recipe, facts)
    variables = environment.resolve(recipe, site, facts, fabric.value, run_folder=str(run_folder), scratch=scratch)
    time, copy = grace.chosen(recipe, site, facts), image.copy(site, facts, engine, scratch)
    python, passed = engine.python(facts.image), environment.passed(recipe)
    job = launchers.Job(
        python=python, folder=folder, hosts=[node.name for node in ranks.nodes], each=ranks.ranks_per_node,
        accelerate=accelerate.files(recipe, folder) if recipe.launcher == "accelerate" else {},
    )  # fmt: skip
    launch = launchers.LAUNCHERS[recipe.launcher](job)
    outside = set(facts.environment) - {*passed, *(variable.name for variable in variables)}
    reasons = {
        "access": _ACCESS[recipe.runs.share],
        "site": f"{site.name}: {site_why}",
        "image": image_why,
        "stage": copy.why,
        "layer": image.layer_reason(files.layer) if files.layer else "",
        **world_reasons,
        "gpus": engine.gpu_access.get(ACCELERATORS[recipe.image], ""),
        "store": f"torch's TCPStore on that port of the first node; {launch.store}",
        "preflight": preflight.why,
        "grace": f"{time.value} s before the time limit: {time.why}" if facts.scheduler == "slurm" else "",
        "fabric": fabric.why,
        "hang": _hang(recipe),
        **training,
    }
    made = Plan(
        dray=dray,
        run=run_folder.name,
        run_folder=str(run_folder),
        attempt=attempt,
        job=facts.job,
        folder=folder,
        scratch=scratch,
        engine=facts.engine,
        image=facts.image,
        image_sha256=facts.image_sha256,
        image_file=facts.image_file,
        layer=files.layer,
        signers=image.signers(recipe, site),
        stage=copy.value,
        variant=recipe.image,
        site=f"site {site.name}",
        sbatch=site.sbatch,
        grace_s=time.value,
        fabric=fabric.value,
        annotations=engine.annotations(recipe.image, site.fabric.kind if facts.nodes > 1 else "", site.annotations),
        preflight=preflight.value,
        user=f"{facts.uid}:{facts.gid}",
        world=ranks,
        batch=shares,
        launcher=launch.argv,
        command=_command(recipe, facts, python, folder),
        where=recipe.command.folder if recipe.command else folder,
        files=dict(launch.files),
        env=variables,
        pass_env=passed,
        left_outside=tuple(sorted(outside)) if engine.isolates_env else (),
        binds=binds.resolve(recipe, site, facts, variables, run_folder=run_folder, scratch=scratch),
        reasons={name: why for name, why in reasons.items() if why},
        recipe=recipe,
    )
    given = rules.Planned(made, site, facts, files)
    return made.model_copy(update={"findings": tuple(finding for rule in rules.RULES for finding in rule(given))})


def _hang(recipe: Recipe) -> str:
    """When a run counts as hung."""
    limit = recipe.hang_timeout_s
    if limit == 0:
        return "never: hang_timeout_s = 0"
    if recipe.train is None:
        return f"no heartbeat or line in a log for {limit} s (hang_timeout_s)" if limit else "never: no hang_timeout_s"
    step = f"{limit} s (hang_timeout_s)" if limit else "ten times the slowest one, at least 600 s"
    rest = "compiling, saving or evaluating 30 minutes, starting or ending 60, or ten times the longest so far"
    return f"a step may take {step}; {rest}"


def _command(recipe: Recipe, facts: Facts, python: str, folder: str) -> tuple[str, ...]:
    if recipe.command is None:
        return (python, "-m", "dray.train", f"{folder}/{names.PLAN}")
    argv = recipe.command.argv
    if argv[0].endswith(".py"):
        argv = (python, *argv)
    if recipe.launcher == "ray":
        argv = (python, "-m", "dray.ray", folder, str(facts.gpus_per_node), *argv)
    return argv
