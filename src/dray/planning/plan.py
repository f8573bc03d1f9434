"""Decide everything that will happen, as data. Pure: what is not in the inputs is not looked up."""

from __future__ import annotations

from pathlib import PurePosixPath

from dray import engines
from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import run_folder as names
from dray.contract.findings import counted
from dray.facts import Facts, Files
from dray.planning import (
    accelerate,
    advice,
    batch,
    binds,
    compiled,
    deterministic,
    environment,
    grace,
    image,
    launchers,
    layers,
    loss,
    memory,
    pins,
    precision,
    refusals,
    sharding,
    signatures,
    staging,
    transport,
    vocabulary,
    world,
)  # fmt: skip
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
    recipe, precision_why = precision.chosen(recipe, site)
    recipe, compiled_why = compiled.chosen(recipe)
    ranks, reasons = world.decide(recipe, site, facts)
    at_first = (len(ranks.nodes) + facts.missing) * ranks.ranks_per_node
    shares = batch.divide(recipe.batch, world_size=ranks.size, at_first=at_first) if recipe.batch else None
    recipe, loss_why = loss.chosen(recipe, shares, files, ranks, memory.limit(site, facts))
    recipe, words_why = vocabulary.chosen(recipe, files)
    fabric, preflight = transport.fabric(recipe, site, facts, engine), transport.preflight(recipe, facts)
    held, too_large = memory.check(recipe.model_copy(update={"batch": shares}), ranks, site, facts, files)
    shards = sharding.reason(recipe, ranks, site, facts, files)
    variables = environment.resolve(recipe, site, facts, fabric.value, run_folder=str(run_folder), scratch=scratch)
    passed, given = environment.passed(recipe), grace.chosen(recipe, site, facts)
    python = engine.python(facts.image)
    signers = signatures.signers(recipe, site)
    copies = staging.chosen(site, facts, engine, ranks, signed=bool(signers))
    job = launchers.Job(
        python=python, folder=str(folder), hosts=[node.name for node in ranks.nodes], each=ranks.ranks_per_node,
        accelerate=accelerate.files(recipe, str(folder)),
    )  # fmt: skip
    launch = launchers.LAUNCHERS[recipe.launcher](job)
    outside = set(facts.environment) - {*passed, *(variable.name for variable in variables)}
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
        stage=copies.folder,
        stage_by=copies.by,
        variant=recipe.image,
        site=f"site {site.name}",
        sbatch=site.sbatch,
        grace_s=given.value,
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
        reasons={
            "access": _ACCESS[recipe.runs.share],
            "site": f"{site.name}: {site_why}",
            "image": image_why,
            **({"stage": copies.why} if copies.why else {}),
            **({"layer": layers.reason(files.layer)} if files.layer else {}),
            **reasons,
            **({"gpus": access} if (access := engine.gpu_access.get(ACCELERATORS[recipe.image])) else {}),
            "store": f"torch's TCPStore on that port of the first node; {launch.store}",
            "preflight": preflight.why,
            **({"grace": f"{given.value} s before the time limit: {given.why}"} if facts.scheduler == "slurm" else {}),
            "fabric": fabric.why,
            "hang": _hang(recipe),
            **({"batch": batch.reason(shares, ranks.size)} if shares else {}),
            **({"training": _training(recipe, precision_why), "memory": held} if recipe.train else {}),
            **({"shards": shards} if shards else {}),
            **({"attention": _attention(recipe), "compile": compiled_why} if recipe.train else {}),
            **({"loss": loss_why, "vocabulary": words_why} if recipe.train else {}),
            **({"hub": pins.reason(recipe)} if pins.on_hub(recipe) else {}),
        },
        recipe=recipe,
    )  # fmt: skip
    found = (
        *loss.refusals(recipe, site, files), *accelerate.refusals(recipe, ranks),
        *layers.refusals(recipe, engine, files), *refusals.in_values(made, facts),
        *refusals.mounts(made, facts, engine), *refusals.find(recipe, site, facts, engine),
        *files.findings, *too_large, *sharding.refusals(recipe, ranks),
        *deterministic.refusals(recipe, ((one.name, one.value, one.source) for one in variables), passed),
        *accelerate.advice(recipe), *grace.find(recipe, site, facts, files), *advice.find(made, site, facts, files),
    )  # fmt: skip
    return made.model_copy(update={"findings": found})


def _training(recipe: Recipe, precision_why: str) -> str:
    """The settings that decide most of the training, with those of a DeepSpeed file."""
    train, model, data = recipe.train, recipe.model, recipe.data
    assert train is not None
    length = counted(train.steps, "step") if train.steps else counted(train.epochs or 0, "epoch")
    offload = f", offload {train.offload}" if train.offload else ""
    tokenizer = model.tokenizer or model.name or "none, a token for each byte"
    schedule = f"{train.lr_scheduler_type} from {train.lr:g}"
    tf32 = " with TF32" if train.precision == "fp32" and train.tf32 and recipe.image != "cpu" else ""
    same = ", deterministic" if train.deterministic else ""
    kind = f"{train.precision}{precision_why}{tf32}{same}"
    packing = "" if data.packing == "wrapped" else f", packing {data.packing}"
    rows = "".join(f"; {key} {named.partition(chr(10))[0]}" for key, named in recipe.maps().items())
    return f"{length}, {train.strategy}{offload}, {kind}, {schedule}; tokenizer: {tokenizer}{packing}{rows}"


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


def _attention(recipe: Recipe) -> str:
    """The attention that each rank chooses once it has the model and its device; its log says which."""
    model = recipe.model.attn_implementation
    if model not in ("auto", "sdpa"):
        return f"{model}: model.attn_implementation"
    if not recipe.data.document_mask:
        return "sdpa, without a mask where none is needed"
    if model == "sdpa" or recipe.image == "cpu":
        return "sdpa, with a mask for documents"
    return (
        "flex_attention with a mask for documents (only cuda's torch has flash attention for them); sdpa with a mask "
        "if the model has attention dropout, heads below 16 or no flex_attention, or the GPU is before compute "
        "capability 8.0"
    )


def _command(recipe: Recipe, facts: Facts, *, python: str, folder: PurePosixPath) -> tuple[str, ...]:
    if recipe.command is None:
        return (python, "-m", "dray.train", str(folder / names.PLAN))
    argv = recipe.command.argv
    argv = (python, *argv) if argv[0].endswith(".py") else argv
    if recipe.launcher != "ray":
        return argv
    return (python, "-m", "dray.ray", str(folder), str(facts.gpus_per_node), *argv)
