"""Why a run that could be planned must not start: a list of rules."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dray.config.image import ACCELERATORS
from dray.contract import sharding
from dray.contract.findings import Finding, counted
from dray.contract.values import control_characters
from dray.planning import deterministic, image
from dray.planning.estimates import memory
from dray.planning.rule import Planned, Rule, refusal
from dray.planning.trainer import emulates_bf16, logit_changes


def _loss_of_other_logits(given: Planned) -> Iterator[Finding]:
    train, changed = given.recipe.train, logit_changes(given.files)
    if train and train.loss == "chunked" and changed:
        yield refusal(
            "train.loss = chunked does not compute this model's loss",
            where="recipe [train]",
            wanted="a model that does not change logits after its head",
            found=changed,
            fix="train.loss=full",
        )


def _layer(given: Planned) -> Iterator[Finding]:
    """Refuse an engine without layers, a layer for another image or digest, an image with other packages."""
    recipe, engine, layer = given.recipe, given.engine, given.files.layer
    if recipe.layer and not engine.binds_layers:
        yield refusal(
            f"{engine.name} cannot bind a layer",
            wanted="apptainer or singularity, since the recipe has a layer",
            found=f"layer = {recipe.layer}",
            fix="leave it out (layer=), or start a SIF; in a Python of your own, pip install its packages",
        )
    if layer is None:
        return
    if layer.variant != recipe.image:
        yield refusal(
            "the layer is for another image",
            where=layer.file,
            wanted=f"a layer for {recipe.image}",
            found=f"a layer for {layer.variant}",
            fix=f"dray image layer {recipe.image} --lock {shlex.quote(layer.file.removesuffix('.sif') + '.lock')}",
        )
    elif layer.changed:
        yield refusal(
            "the layer was made for other packages than the image has",
            where=layer.file,
            wanted="the versions that it was locked for",
            found="\n".join(layer.changed),
            fix=f"make it again: dray image layer {recipe.image} --upgrade with the same --pip",
        )
    if recipe.layer_digest and layer.digest != recipe.layer_digest:
        yield refusal(
            "the layer has another digest",
            where=layer.file,
            wanted=f"{recipe.layer_digest} (layer_digest of the recipe)",
            found=layer.digest,
            fix=f"make the same bytes again from its lock: dray image layer {recipe.image} --lock FILE",
        )


def _control_characters(given: Planned) -> Iterator[Finding]:
    """Refuse control characters in values for node.sh, srun, sbatch or facts.txt; others are only in plan.json."""
    inside = {"recipe", "files", "command", "reasons", "findings"}
    yield from control_characters(given.plan.model_dump(exclude=inside, exclude_none=True))
    yield from control_characters(given.facts.model_dump(), "facts")


def _mounts(given: Planned) -> Iterator[Finding]:
    """Refuse paths that would break the engine's options. On a login node a site's paths still have variables."""
    plan, engine = given.plan, given.engine
    binds = [bind.path for bind in plan.binds if not (given.facts.login and bind.source.startswith("site "))]
    for path in dict.fromkeys((*binds, plan.where, plan.image)):
        if set(engine.unmountable) & set(path):
            yield refusal(
                f"{engine.name} cannot mount a path with {' or '.join(engine.unmountable)} in it",
                wanted=f"a path that {engine.name} reads as one word",
                found=path,
                fix="name another folder",
            )


def _account(given: Planned) -> Iterator[Finding]:
    """Without one such a cluster refuses the job in words of its own, or lets it wait for ever."""
    site = given.site
    if site.account and given.facts.login and not given.facts.account:
        yield refusal(
            "this site requires --account",
            where=f"site {site.name}",
            wanted=f"an account such as {site.account}",
            found="no --account, and SBATCH_ACCOUNT is not set",
            fix=f"dray submit --sbatch=--account={site.account}, or export SBATCH_ACCOUNT",
        )


def _folders(given: Planned) -> Iterator[Finding]:
    """Refuse a site whose folders the job's first node lacks: in most cases it is another cluster's."""
    site, facts = given.site, given.facts
    absent = [path for path in site.folders() if facts.paths.get(path) == "absent"]
    if absent:
        yield refusal(
            f"this cluster does not look like site {site.name}",
            where=f"the first node of {facts.nodelist}",
            wanted=f"{', '.join(absent)}, which site {site.name} has on every node",
            found="no such folder",
            fix="name this cluster's site: export DRAY_SITE=NAME (dray site list), or generic. If only this node lacks "
            "them, leave it out: sbatch --exclude",
        )


def _gpus(given: Planned) -> Iterator[Finding]:
    """Refuse an image that cannot use the job's GPUs. With image = cpu a hostfile's slots are no GPUs."""
    recipe, facts = given.recipe, given.facts
    if recipe.image == "cpu" and facts.gpus_per_node and recipe.gpus == "all" and facts.scheduler != "hosts":
        named = "the adopted image has a torch for CPUs" if recipe.adopted else "image=cpu"
        idle = "" if recipe.adopted else "image=cpu "
        yield refusal(
            f"the job has GPUs, and the {recipe.image} image cannot use them",
            wanted="an image for these GPUs",
            found=f"{counted(facts.gpus_per_node, 'GPU')} on each node, and {named}",
            fix=f"image={given.site.image or 'cuda'}; or {idle}gpus=none ranks_per_node=N, to leave them idle",
        )


def _site_gpus(given: Planned) -> Iterator[Finding]:
    recipe, site = given.recipe, given.site
    if ACCELERATORS[recipe.image] not in ("cpu", ACCELERATORS[site.image or recipe.image]):
        yield refusal(
            f"the {recipe.image} image is not for this site's GPUs",
            where=f"site {site.name}: {site.about}",
            wanted=f"image={site.image}",
            found=f"image={recipe.image}",
            fix=f"set image={site.image}, or name another site",
        )


def _adopted(given: Planned) -> Iterator[Finding]:
    recipe, facts, engine = given.recipe, given.facts, given.engine
    if recipe.adopted and (engine.image != "file" or "sif" not in engine.formats):
        yield refusal(
            f"{engine.name} does not start an adopted image, which is a SIF",
            wanted="apptainer or singularity",
            found=f"adopted={recipe.adopted}",
            fix="sbatch, dray submit, or leave it out: adopted=",
        )
    elif recipe.adopted and facts.image and not image.is_adopted(recipe, facts):
        other = f"adopted={image.adopted(facts)}"
        if not facts.adopted:
            other = "an image that was not adopted, or does not exist"
        yield refusal(
            "the image is not the adopted one that the recipe names",
            where=facts.image,
            wanted=f"adopted={recipe.adopted}",
            found=other,
            fix="unset DRAY_IMAGE" if facts.image_given else image.adopt_line(recipe.adopted),
        )
    if recipe.launcher in facts.adopted_lacks.split():
        yield refusal(
            f"the adopted image lacks the launcher {recipe.launcher}",
            where=facts.adopted_from,
            wanted=f"{recipe.launcher} in the image",
            found=f"launcher={recipe.launcher}",
            fix="launcher=torchrun; or use an image that has it, or one of dray's own with a layer",
        )


def _variant(given: Planned) -> Iterator[Finding]:
    recipe, facts = given.recipe, given.facts
    if facts.image_variant not in ("", recipe.image):
        yield refusal(
            "the image has another variant than the recipe",
            where=facts.image,
            wanted=recipe.image,
            found=facts.image_variant,
            fix=f"set image={facts.image_variant}, or start the {recipe.image} image: unset DRAY_IMAGE, or set it to "
            "that image's file",
        )


def _digest(given: Planned) -> Iterator[Finding]:
    recipe, facts, engine = given.recipe, given.facts, given.engine
    if not recipe.image_digest:
        return
    if engine.image != "file":
        yield refusal(
            "image_digest pins a SIF, which only Apptainer starts",
            wanted=recipe.image_digest,
            found=f"engine {engine.name}",
            fix="sbatch, dray submit or --engine apptainer; to try the recipe with this engine: image_digest=",
        )
    elif facts.image_digest not in ("", recipe.image_digest):
        yield refusal(
            "the image has another digest than the recipe",
            where=facts.image,
            wanted=f"{recipe.image_digest} (the recipe's image_digest)",
            found=facts.image_digest,
            fix=f"copy that image to {facts.image}, or set image_digest={facts.image_digest}",
        )


def _signers(given: Planned) -> Iterator[Finding]:
    """Refuse a demand that no node could check."""
    recipe, site, engine = given.recipe, given.site, given.engine
    if not recipe.image_signers and not site.image_signers:
        return
    if not engine.verifies:
        yield refusal(
            f"{engine.name} cannot check who signed an image",
            wanted="apptainer or singularity, since image_signers is set",
            found=f"engine {engine.name}",
            fix="leave image_signers out of the recipe or the site file, or start a SIF",
        )
    elif not given.plan.signers:
        yield refusal(
            "the recipe and the site have no key in common in image_signers",
            where=f"site {site.name}",
            wanted=f"one of the site's image_signers: {', '.join(site.image_signers)}",
            found=f"the recipe's: {', '.join(recipe.image_signers)}",
            fix="add a key of the site to the recipe's image_signers",
        )


def _checkpoints(given: Planned) -> Iterator[Finding]:
    """Each rank writes its part, and the first gives the checkpoint its name: all must see the folder."""
    checkpoint, facts = given.recipe.checkpoint, given.facts
    if facts.scheduler == "hosts" and facts.nodes > 1 and checkpoint.every and not checkpoint.folder:
        yield refusal(
            "hostfile runs need a shared checkpoint.folder",
            where="recipe [checkpoint]",
            wanted="checkpoint.folder on a disk that all machines see",
            found="checkpoint.every without it: each machine has a run folder of its own",
            fix="checkpoint.folder=/a/shared/folder, or checkpoint.every=[] to keep only the last model",
        )


def _compiled(given: Planned) -> Iterator[Finding]:
    """Refuse a path that breaks torch.compile: Inductor does not quote torch's folder for the linker (torch 2.13)."""
    train, path = given.recipe.train, given.facts.image
    if train and train.compile and given.engine.image == "python" and " " in path:
        yield refusal(
            "train.compile needs torch in a folder without a space in its path",
            where=path,
            wanted="a path that torch.compile gives to the linker as one word",
            found="a space, where the linker takes it for two",
            fix="move the environment, or leave compilation out: train.compile=false",
        )


def _precision(given: Planned) -> Iterator[Finding]:
    """Refuse bf16 on GPUs that emulate it: a run would be slow without a warning."""
    train, site = given.recipe.train, given.site
    if train and train.precision == "bf16" and emulates_bf16(given.recipe, site):
        yield refusal(
            "the GPUs of this site emulate bf16, without tensor cores",
            where=f"site {site.name}: {site.about}",
            wanted="train.precision = fp16 or fp32",
            found="train.precision = bf16",
            fix="train.precision=fp16",
        )


def _files(given: Planned) -> Iterator[Finding]:
    yield from given.files.findings


def _shards(given: Planned) -> Iterator[Finding]:
    train, nodes = given.recipe.train, len(given.plan.world.nodes)
    shard = train.fsdp_shard if train else "auto"
    if isinstance(shard, int) and nodes % shard:
        known = sharding.nodes_of("auto", nodes)
        yield refusal(
            "train.fsdp_shard does not divide the number of nodes",
            wanted=f"one of {', '.join(map(str, known))}, which divide {counted(nodes, 'node')} into equal groups",
            found=f"train.fsdp_shard = {shard}",
            fix=f"train.fsdp_shard={max(count for count in known if count <= shard)}, or auto",
        )


def _deterministic(given: Planned) -> Iterator[Finding]:
    """Refuse variables with which two runs differ; a variable in pass_env has no value yet."""
    values = {variable.name: (f"{variable.name}={variable.value}", variable.source) for variable in given.plan.env}
    values |= {name: (f"{name} in pass_env", "recipe") for name in given.plan.pass_env}
    for setting in deterministic.settings(given.recipe):
        shown, source = values[setting.name]
        accepted = [f"{setting.name}={value}" for value in setting.values]
        if shown.casefold() not in map(str.casefold, accepted):
            yield refusal(
                f"{setting.name} prevents deterministic runs: {setting.why}",
                where=source,
                wanted=f"{' or '.join(accepted)}, for train.deterministic",
                found=shown,
                fix=f"leave {setting.name} out, or train.deterministic=false",
            )


RULES: tuple[Rule, ...] = (
    _loss_of_other_logits, _layer, _control_characters, _mounts, _account, _folders, _gpus,
    _site_gpus, _adopted, _variant, _digest, _signers, _checkpoints, _compiled, _precision, _files, memory.refusals,
    _shards, _deterministic,
)  # fmt: skip
"""The first finding ends the run."""
