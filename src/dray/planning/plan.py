"""Decide everything that will happen, as data. Pure: what is not in the inputs is not looked up."""

from __future__ import annotations

from pathlib import PurePosixPath

from dray import engines
from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import run_folder as names
from dray.facts import Facts, Files
from dray.planning import (
    accelerate,
    advice,
    batch,
    binds,
    environment,
    grace,
    image,
    launchers,
    pins,
    refusals,
    trainer,
    transport,
    world,
)  # fmt: skip
from dray.planning.rule import Planned
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
    files, engine, folder = files or Files(), engines.get(facts.engine), run_folder / names.attempt(attempt)
    recipe, image_why = image.chosen(recipe, site, facts)
    ranks, world_reasons = world.decide(recipe, site, facts)
    at_first = (len(ranks.nodes) + facts.missing) * ranks.ranks_per_node
    shares = batch.divide(recipe.batch, world_size=ranks.size, at_first=at_first) if recipe.batch else None
    recipe, training = trainer.decide(recipe, shares, ranks, site=site, facts=facts, files=files)
    fabric, preflight = transport.fabric(recipe, site, facts, engine), transport.preflight(recipe, facts)
    variables = environment.resolve(recipe, site, facts, fabric.value, run_folder=str(run_folder), scratch=scratch)
    time = grace.chosen(recipe, site, facts)
    python = engine.python(facts.image)
    signers = image.signers(recipe, site)
    staged = image.copy(site, facts, engine, scratch)
    job = launchers.Job(
        python=python, folder=str(folder), hosts=[node.name for node in ranks.nodes], each=ranks.ranks_per_node,
        accelerate=accelerate.files(recipe, str(folder)),
    )  # fmt: skip
    launch = launchers.LAUNCHERS[recipe.launcher](job)
    passed = environment.passed(recipe)
    outside = set(facts.environment) - {*passed, *(variable.name for variable in variables)}
    reasons = {
        "access": _ACCESS[recipe.runs.share],
        "site": f"{site.name}: {site_why}",
        "image": image_why,
        "stage": staged.why,
        "layer": image.layer_reason(files.layer) if files.layer else "",
        **world_reasons,
        "gpus": engine.gpu_access.get(ACCELERATORS[recipe.image], ""),
        "store": f"torch's TCPStore on that port of the first node; {launch.store}",
        "preflight": preflight.why,
        "grace": f"{time.value} s before the time limit: {time.why}" if facts.scheduler == "slurm" else "",
        "fabric": fabric.why,
        "hang": _hang(recipe),
        "batch": batch.reason(shares, ranks.size) if shares else "",
        **training,
        "hub": pins.reason(recipe),
    }
    made = Plan(
        dray=dray,
        run=run_folder.name,
        run_folder=str(run_folder),
        attempt=attempt,
        job=facts.job,
        folder=str(folder),
        scratch=scratch,
        engine=facts.engine,
        image=facts.image,
        image_sha256=facts.image_sha256,
        image_file=facts.image_file,
        layer=files.layer,
        signers=signers,
        stage=staged.value,
        variant=recipe.image,
        site=f"site {site.name}",
        sbatch=site.sbatch,
        grace_s=time.value,
        fabric=fabric.value,
        annotations=transport.hooks(recipe, site, facts, engine),
        preflight=preflight.value,
        user=f"{facts.uid}:{facts.gid}",
        world=ranks,
        batch=shares,
        launcher=launch.argv,
        command=_command(recipe, facts, python=python, folder=folder),
        where=recipe.command.folder if recipe.command else str(folder),
        files=dict(launch.files),
        env=variables,
        pass_env=passed,
        left_outside=tuple(sorted(outside)) if engine.isolates_env else (),
        binds=binds.resolve(recipe, site, facts, variables, run_folder=run_folder, scratch=scratch),
        reasons={name: why for name, why in reasons.items() if why},
        recipe=recipe,
    )  # fmt: skip
    given = Planned(made, site, facts, files)
    findings = [finding for rule in (*refusals.RULES, *advice.RULES) for finding in rule(given)]
    return made.model_copy(update={"findings": tuple(findings)})


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


def _command(recipe: Recipe, facts: Facts, *, python: str, folder: PurePosixPath) -> tuple[str, ...]:
    if recipe.command is None:
        return (python, "-m", "dray.train", str(folder / names.PLAN))
    argv = recipe.command.argv
    argv = (python, *argv) if argv[0].endswith(".py") else argv
    if recipe.launcher != "ray":
        return argv
    return (python, "-m", "dray.ray", str(folder), str(facts.gpus_per_node), *argv)
