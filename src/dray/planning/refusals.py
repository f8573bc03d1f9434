"""Why a run that could be planned must not start."""

from __future__ import annotations

from collections.abc import Iterator

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import Finding, counted
from dray.contract.values import control_characters
from dray.engines.base import Engine
from dray.facts import Facts
from dray.planning import image, precision, signatures
from dray.planning.schema import Plan


def find(recipe: Recipe, site: Site, facts: Facts, engine: Engine) -> Iterator[Finding]:
    """Every refusal that needs no estimate."""
    yield from _account(site, facts)
    yield from _folders(site, facts)
    yield from _gpus(recipe, site, facts)
    yield from _variant(recipe, site, facts, engine)
    yield from _digest(recipe, facts, engine)
    yield from signatures.refusals(recipe, site, engine)
    yield from _checkpoints(recipe, facts)
    yield from _compiled(recipe, facts, engine)
    yield from precision.refusals(recipe, site)


def in_values(made: Plan, facts: Facts) -> Iterator[Finding]:
    """Refuse control characters in values for node.sh, srun, sbatch or facts.txt; others are only in plan.json."""
    inside = {"recipe", "files", "command", "reasons", "findings"}
    yield from control_characters(made.model_dump(exclude=inside, exclude_none=True))
    yield from control_characters(facts.model_dump(), "facts")


def mounts(made: Plan, facts: Facts, engine: Engine) -> Iterator[Finding]:
    """Refuse paths that would break the engine's options. On a login node a site's paths still have variables."""
    never = engine.unmountable
    binds = [bind.path for bind in made.binds if not (facts.login and bind.source.startswith("site "))]
    for path in dict.fromkeys((*binds, made.where, made.image)):
        if never and set(never) & set(path):
            yield _refusal(
                f"{engine.name} cannot mount a path with {' or '.join(never)} in it",
                wanted=f"a path that {engine.name} reads as one word",
                found=path,
                fix="name another folder",
            )


def _refusal(problem: str, *, wanted: str, found: str, fix: str, where: str = "") -> Finding:
    return Finding(problem, where=where, wanted=wanted, found=found, fix=fix, code=exit_codes.CONFIG)


def _account(site: Site, facts: Facts) -> Iterator[Finding]:
    """Without one such a cluster refuses the job in words of its own, or lets it wait for ever."""
    if site.account and facts.login and not facts.account:
        yield _refusal(
            "this site requires --account",
            where=f"site {site.name}",
            wanted=f"an account such as {site.account}",
            found="no --account, and SBATCH_ACCOUNT is not set",
            fix=f"dray submit --sbatch=--account={site.account}, or export SBATCH_ACCOUNT",
        )


def _folders(site: Site, facts: Facts) -> Iterator[Finding]:
    """Refuse a site whose folders the job's first node lacks: in most cases it is another cluster's."""
    absent = [path for path in site.folders() if facts.paths.get(path) == "absent"]
    if absent:
        yield _refusal(
            f"this cluster does not look like site {site.name}",
            where=f"the first node of {facts.nodelist}",
            wanted=f"{', '.join(absent)}, which site {site.name} has on every node",
            found="no such folder",
            fix="name this cluster's site: export DRAY_SITE=NAME (dray site list), or generic. If only this node lacks "
            "them, leave it out: sbatch --exclude",
        )


def _gpus(recipe: Recipe, site: Site, facts: Facts) -> Iterator[Finding]:
    """Refuse an image that cannot use the job's GPUs. With image = cpu a hostfile's slots are no GPUs."""
    if recipe.image == "cpu" and facts.gpus_per_node and recipe.gpus == "all" and facts.scheduler != "hosts":
        image = "the adopted image has a torch for CPUs" if recipe.adopted else "image=cpu"
        idle = "" if recipe.adopted else "image=cpu "
        yield _refusal(
            f"the job has GPUs, and the {recipe.image} image cannot use them",
            wanted="an image for these GPUs",
            found=f"{counted(facts.gpus_per_node, 'GPU')} on each node, and {image}",
            fix=f"image={site.image or 'cuda'}; or {idle}gpus=none ranks_per_node=N, to leave them idle",
        )


def _variant(recipe: Recipe, site: Site, facts: Facts, engine: Engine) -> Iterator[Finding]:
    accelerator, given = ACCELERATORS[recipe.image], ACCELERATORS[site.image or recipe.image]
    if accelerator not in ("cpu", given):
        yield _refusal(
            f"the {recipe.image} image is not for this site's GPUs",
            where=f"site {site.name}: {site.about}",
            wanted=f"image={site.image}",
            found=f"image={recipe.image}",
            fix=f"set image={site.image}, or name another site",
        )
    if recipe.adopted and (engine.image != "file" or "sif" not in engine.formats):
        yield _refusal(
            f"{engine.name} does not start an adopted image, which is a SIF",
            wanted="apptainer or singularity",
            found=f"adopted={recipe.adopted}",
            fix="sbatch, dray submit, or leave it out: adopted=",
        )
    elif recipe.adopted and facts.image and not image.is_adopted(recipe, facts):
        yield _refusal(
            "the image is not the adopted one that the recipe names",
            where=facts.image,
            wanted=f"adopted={recipe.adopted}",
            found=f"adopted={image.adopted(facts)}"
            if facts.adopted
            else "an image that was not adopted, or does not exist",
            fix="unset DRAY_IMAGE" if facts.image_given else image.adopt_line(recipe.adopted),
        )
    if recipe.launcher in facts.adopted_lacks.split():
        yield _refusal(
            f"the adopted image lacks the launcher {recipe.launcher}",
            where=facts.adopted_from,
            wanted=f"{recipe.launcher} in the image",
            found=f"launcher={recipe.launcher}",
            fix="launcher=torchrun; or use an image that has it, or one of dray's own with a layer",
        )
    if facts.image_variant not in ("", recipe.image):
        yield _refusal(
            "the image has another variant than the recipe",
            where=facts.image,
            wanted=recipe.image,
            found=facts.image_variant,
            fix=f"set image={facts.image_variant}, or start the {recipe.image} image: unset DRAY_IMAGE, or set it to "
            "that image's file",
        )


def _digest(recipe: Recipe, facts: Facts, engine: Engine) -> Iterator[Finding]:
    if not recipe.image_digest:
        return
    if engine.image != "file":
        yield _refusal(
            "image_digest pins a SIF, which only Apptainer starts",
            wanted=recipe.image_digest,
            found=f"engine {engine.name}",
            fix="sbatch, dray submit or --engine apptainer; to try the recipe with this engine: image_digest=",
        )
    elif facts.image_digest not in ("", recipe.image_digest):
        yield _refusal(
            "the image has another digest than the recipe",
            where=facts.image,
            wanted=f"{recipe.image_digest} (the recipe's image_digest)",
            found=facts.image_digest,
            fix=f"copy that image to {facts.image}, or set image_digest={facts.image_digest}",
        )


def _compiled(recipe: Recipe, facts: Facts, engine: Engine) -> Iterator[Finding]:
    """Refuse a path that breaks torch.compile: Inductor does not quote torch's folder for the linker (torch 2.13)."""
    if recipe.train and recipe.train.compile and engine.image == "python" and " " in facts.image:
        yield _refusal(
            "train.compile needs torch in a folder without a space in its path",
            where=facts.image,
            wanted="a path that torch.compile gives to the linker as one word",
            found="a space, where the linker takes it for two",
            fix="move the environment, or leave compilation out: train.compile=false",
        )


def _checkpoints(recipe: Recipe, facts: Facts) -> Iterator[Finding]:
    """Each rank writes its part, and the first gives the checkpoint its name: all must see the folder."""
    if facts.scheduler == "hosts" and facts.nodes > 1 and recipe.checkpoint.every and not recipe.checkpoint.folder:
        yield _refusal(
            "hostfile runs need a shared checkpoint.folder",
            where="recipe [checkpoint]",
            wanted="checkpoint.folder on a disk that all machines see",
            found="checkpoint.every without it: each machine has a run folder of its own",
            fix="checkpoint.folder=/a/shared/folder, or checkpoint.every=[] to keep only the last model",
        )
