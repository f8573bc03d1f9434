"""What is wrong or unwise in a plan: one list of rules, each with its finding. One with a code refuses the run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from itertools import dropwhile
from typing import NamedTuple

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import STRATEGIES
from dray.contract import exit_codes
from dray.contract.control_characters import control_characters
from dray.contract.findings import Finding, counted, listed
from dray.facts import Facts, Files
from dray.planning import environment, grace, image, trainer_defaults, world
from dray.planning.estimates import memory, model_shape
from dray.planning.schema import Plan

_LAUNCHER = re.compile(
    r"(\S*/)?(torchrun|deepspeed|mpirun|mpiexec|srun|accelerate-launch|horovodrun"
    r"|accelerate launch"
    r"|python[\d.]* -m (torch\.distributed\.(run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.\w+))(?= |$)"
)
_TIME = ("--time", "-t")
_CORES = ("--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive")
_ENDING = ("CANCEL", "REQUEUE")  # modes of preemption after which a job runs no longer


class Planned(NamedTuple):
    """A plan, and what it was made from."""

    plan: Plan
    site: Site
    facts: Facts
    files: Files

    @property
    def recipe(self) -> Recipe:
        """The recipe with every choice made."""
        return self.plan.recipe


refusal, note = partial(Finding, code=exit_codes.CONFIG), partial(Finding, kind="note")


def _engine(given: Planned) -> Iterator[Finding]:
    """Refuse what an engine cannot do with its image."""
    recipe, engine = given.recipe, engines.get(given.facts.engine)
    sif = engine.image == "file"
    for key, value, able, task in (
        ("layer", recipe.layer, engine.binds_layers, "bind a layer"),
        ("adopted", recipe.adopted, sif and "sif" in engine.formats, "start an adopted image, which is a SIF"),
        ("image_digest", recipe.image_digest, sif, "check an image's digest"),
        (
            "image_signers",
            recipe.image_signers or given.site.image_signers,
            engine.verifies,
            "check who signed an image",
        ),
    ):
        if value and not able:
            yield refusal(
                f"{engine.name} cannot {task}",
                wanted=f"apptainer or singularity, since {key} is set",
                found=f"engine {engine.name}",
                fix=f"start a SIF, by sbatch or dray submit; or leave {key} out of the recipe and the site file",
            )


def _layer(given: Planned) -> Iterator[Finding]:
    """Refuse a layer for another image or digest, and an image with other packages."""
    recipe, layer = given.recipe, given.files.layer
    if layer is None:
        return
    again = f"dray image layer {recipe.image}"
    from_lock = f"{again} --lock {shlex.quote(layer.file.removesuffix('.sif') + '.lock')}"
    if layer.variant != recipe.image:
        yield refusal(
            "the layer is for another image",
            where=layer.file,
            wanted=f"a layer for {recipe.image}",
            found=f"a layer for {layer.variant}",
            fix=from_lock,
        )
    if layer.changed:
        yield refusal(
            "the layer was made for other packages than the image has",
            where=layer.file,
            wanted="the versions that it was locked for",
            found="\n".join(layer.changed),
            fix=f"{again} --upgrade with the same --pip",
        )
    if recipe.layer_digest not in (None, layer.digest):
        yield refusal(
            "the layer has another digest",
            where=layer.file,
            wanted=recipe.layer_digest,
            found=layer.digest,
            fix=from_lock,
        )


def _control_characters(given: Planned) -> Iterator[Finding]:
    """Refuse control characters in values for node.sh, srun, sbatch or facts.txt; others are only in plan.json."""
    inside = {"recipe", "files", "command", "reasons", "findings"}
    yield from control_characters(given.plan.model_dump(exclude=inside, exclude_none=True))
    yield from control_characters(given.facts.model_dump(), "facts")


def _mounts(given: Planned) -> Iterator[Finding]:
    """Refuse paths that would break the engine's options. On a login node a site's paths still have variables."""
    plan, engine = given.plan, engines.get(given.facts.engine)
    binds = [bind.path for bind in plan.binds if not (given.facts.login and bind.source.startswith("site "))]
    for path in dict.fromkeys((*binds, plan.where, plan.image)):
        if set(engine.unmountable) & set(path):
            yield refusal(
                f"{engine.name} cannot mount a path with {' or '.join(engine.unmountable)} in it",
                wanted=f"a path that {engine.name} reads as one word",
                found=path,
                fix="name another folder",
            )


def _site(given: Planned) -> Iterator[Finding]:
    """Refuse a job without the account that sbatch wants, and a site whose folders the first node lacks."""
    site, facts = given.site, given.facts
    if site.account and facts.login and not facts.account:
        yield refusal(
            "this site requires --account",
            where=f"site {site.name}",
            wanted=f"an account such as {site.account}",
            found="no --account, and SBATCH_ACCOUNT is not set",
            fix=f"dray submit --sbatch=--account={site.account}, or export SBATCH_ACCOUNT",
        )
    if absent := [path for path in site.folders() if facts.paths.get(path) == "absent"]:
        yield refusal(
            f"this cluster does not look like site {site.name}",
            where=f"the first node of {facts.nodelist}",
            wanted=f"{', '.join(absent)}, which site {site.name} has on every node",
            found="no such folder",
            fix="name this cluster's site: export DRAY_SITE=NAME (dray site list), or generic. If only this node lacks "
            "them, leave it out: sbatch --exclude",
        )


def _gpus(given: Planned) -> Iterator[Finding]:
    """Find an image that is not for the job's or the site's GPUs. With image = cpu a hostfile's slots are no GPUs."""
    recipe, site, facts = given.recipe, given.site, given.facts
    if recipe.image == "cpu":
        if facts.gpus_per_node and recipe.gpus == "all" and facts.scheduler != "hosts":
            name, other = "the cpu image", f"image={site.image or 'cuda'}"
            if adopted := image.adopted(facts):
                name, other = f"the adopted image {adopted}", "adopted=NAME of an image whose torch has these GPUs"
            yield refusal(
                f"the job has GPUs, and {name} cannot use them",
                wanted="an image for these GPUs",
                found=f"{counted(facts.gpus_per_node, 'GPU')} on each node",
                fix=f"{other}; or gpus=none ranks_per_node=N, to leave them idle",
            )
    elif ACCELERATORS[recipe.image] != ACCELERATORS[site.image or recipe.image]:
        yield refusal(
            f"the {recipe.image} image is not for this site's GPUs",
            where=f"site {site.name}: {site.about}",
            wanted=f"image={site.image}",
            found=f"image={recipe.image}",
            fix=f"set image={site.image}, or name another site",
        )
    elif site.image not in (None, recipe.image):
        why = " ".join(site.why.get("image", "").split())
        yield note(f"site {site.name} has GPUs for image={site.image}", found=f"image={recipe.image}", source=why)


def _image(given: Planned) -> Iterator[Finding]:
    """Refuse an image that is another one than the recipe says, that nobody can sign, or that lacks the launcher."""
    recipe, site, facts = given.recipe, given.site, given.facts
    if recipe.adopted and facts.image and not image.is_adopted(recipe, facts):
        fix = f"dray image adopt SOURCE --name {recipe.adopted}"
        if facts.image_given:
            fix = "unset DRAY_IMAGE"
        elif "/" in recipe.adopted:
            fix = f"dray image adopt {shlex.quote(recipe.adopted)}"
        yield refusal(
            "the image is not the adopted one that the recipe names",
            where=facts.image,
            wanted=recipe.adopted,
            found=image.adopted(facts) or "an image that was not adopted, or does not exist",
            fix=fix,
        )
    if facts.image_variant not in ("", recipe.image):
        other = f"unset DRAY_IMAGE, or set it to the file of the {recipe.image} image"
        yield refusal(
            "the image has another variant than the recipe",
            where=facts.image,
            wanted=recipe.image,
            found=facts.image_variant,
            fix=f"image={facts.image_variant}; or {other}",
        )
    if recipe.image_digest and facts.image_digest not in ("", recipe.image_digest):
        yield refusal(
            "the image has another digest than the recipe",
            where=facts.image,
            wanted=recipe.image_digest,
            found=facts.image_digest,
            fix=f"copy that image to {facts.image}, or set image_digest={facts.image_digest}",
        )
    if recipe.image_signers and site.image_signers and not given.plan.signers:
        yield refusal(
            "the recipe and the site have no key in common in image_signers",
            where=f"site {site.name}",
            wanted=f"one of the site's image_signers: {', '.join(site.image_signers)}",
            found=f"the recipe's: {', '.join(recipe.image_signers)}",
            fix="add a key of the site to the recipe's image_signers",
        )
    if recipe.launcher in facts.adopted_lacks.split():
        yield refusal(
            f"the adopted image lacks the launcher {recipe.launcher}",
            where=facts.adopted_from,
            wanted=f"{recipe.launcher} in the image",
            found=f"launcher={recipe.launcher}",
            fix="launcher=torchrun; or use an image that has it, or one of dray's own with a layer",
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


def _trainer(given: Planned) -> Iterator[Finding]:
    """Find a loss, a precision and groups of fsdp that cannot be, or are slow."""
    recipe, site, nodes = given.recipe, given.site, len(given.plan.world.nodes)
    if not recipe.train:
        return
    loss, shard, changes = recipe.train.loss, recipe.train.fsdp_shard, trainer_defaults.logit_changes(given.files)
    if loss == "chunked" and changes:
        yield refusal(
            "train.loss = chunked does not compute this model's loss",
            where="recipe [train]",
            wanted="a model that does not change logits after its head",
            found=changes,
            fix="train.loss=full",
        )
    if isinstance(shard, int) and nodes % shard:
        yield refusal(
            "train.fsdp_shard does not divide the number of nodes",
            where="recipe [train]",
            wanted=f"a divisor of {counted(nodes, 'node')}: {listed(map(str, world.divisors(nodes)))}",
            found=f"train.fsdp_shard = {shard}",
            fix="train.fsdp_shard=auto",
        )
    if recipe.train.precision == "bf16" and recipe.image != "cpu" and not site.bf16:
        yield refusal(
            "the GPUs of this site emulate bf16, without tensor cores",
            where=f"site {site.name}: {site.about}",
            wanted="train.precision = fp16 or fp32",
            found="train.precision = bf16",
            fix="train.precision=fp16",
        )
    elif recipe.train.precision == "bf16" and recipe.image == "cuda12":
        fix = "train.precision=fp16, and bf16 = false in the site file"
        yield note("GPUs before A100 (V100) emulate bf16", fix=fix)
    if recipe.model.dtype == "bf16" and not STRATEGIES[recipe.train.strategy].deepspeed and not recipe.has_lora:
        fix = "model.dtype=fp32 (train.precision stays)"
        yield note("16-bit weights lose updates that are much smaller", found="model.dtype = bf16", fix=fix)


def _compiled(given: Planned) -> Iterator[Finding]:
    """Refuse a path that breaks torch.compile: Inductor does not quote torch's folder for the linker (torch 2.13)."""
    train, facts = given.recipe.train, given.facts
    if train and train.compile and engines.get(facts.engine).image == "python" and " " in facts.image:
        yield refusal(
            "train.compile needs torch in a folder without a space in its path",
            where=facts.image,
            wanted="a path that torch.compile gives to the linker as one word",
            found="a space, where the linker takes it for two",
            fix="move the environment, or leave compilation out: train.compile=false",
        )


def _files(given: Planned) -> Iterator[Finding]:
    """Find what is missing on this machine; a job is offline, and fails at its start when something is missing."""
    recipe, files = given.recipe, given.files
    yield from files.findings
    for key, path in files.missing_paths.items():
        fix = "correct it, or make sure that the nodes have it; a dataset on the hub is hub:OWNER/NAME"
        yield note(f"{key} = {path} does not exist on this machine", fix=fix)
    variables = {variable.name: variable.value for variable in given.plan.env}
    if variables.get("HF_HUB_OFFLINE") != "1":
        return
    for key, name in recipe.datasets().items():
        if "hf://" in name:
            fix = 'set env.HF_HUB_OFFLINE = "0" in the recipe if the nodes reach the hub'
            yield note(f"{key} is read from the hub, and the job is offline", found=name, fix=fix)
    if files.missing_on_hub:
        missing = f"not in HF_HOME ({variables.get('HF_HOME', 'not set')}): {', '.join(files.missing_on_hub)}"
        problem = "the job is offline, and files that it needs are not downloaded"
        yield note(problem, found=missing, fix="dray data prefetch RECIPE")


def _memory(given: Planned) -> Iterator[Finding]:
    """Refuse a run that cannot fit, before it waits in the queue."""
    recipe, world, facts = given.recipe, given.plan.world, given.facts
    most, model = memory.limit(given.site, facts), model_shape.known(given.files)
    if recipe.train is None or not most or model is None:
        return
    recipe = recipe.model_copy(update={"batch": given.plan.batch})
    needed = memory.estimate(recipe, model, ranks=world.size, ranks_per_node=world.ranks_per_node)
    if needed.on_gpu > most * memory.GB:
        named = f"site {given.site.name}" if facts.gpu_memory_gb is None else "--gpu-memory"
        other = "use more nodes, a smaller model or [lora]; or, if this estimate is wrong, --gpu-memory=0"
        yield refusal(
            f"the model does not fit: {model.parameters:,} parameters",
            wanted=f"at most {most:g} GB on each GPU ({named})",
            found="\n".join(needed.lines()),
            fix=memory.fitting(recipe, model, world, most * memory.GB) or other,
        )


def _deterministic(given: Planned) -> Iterator[Finding]:
    """Refuse variables with which two runs differ; a variable in pass_env has no value yet."""
    variables = {variable.name: variable for variable in given.plan.env}
    for setting in environment.deterministic(given.recipe):
        name, variable = setting.name, variables.get(setting.name)
        if variable is None or variable.value.casefold() not in map(str.casefold, setting.values):
            accepted = " or ".join(f"{name}={value}" for value in setting.values)
            yield refusal(
                f"{name} prevents deterministic runs: {setting.why}",
                where=variable.source if variable else "recipe",
                wanted=f"{accepted}, for train.deterministic",
                found=f"{name}={variable.value}" if variable else f"{name} in pass_env",
                fix=f"leave {name} out, or train.deterministic=false",
            )


def _silent_cpu(given: Planned) -> Iterator[Finding]:
    recipe, command = given.recipe, given.recipe.command
    deepspeed = recipe.launcher == "deepspeed"
    if recipe.image == "cpu" and command and (deepspeed or command.strategy not in (None, "ddp")):
        yield Finding(
            "on a CPU transformers' Trainer and accelerate silently train without FSDP and DeepSpeed",
            wanted="GPUs",
            found="image = cpu",
            fix="image=cuda; or plain data parallelism, which it is on a CPU: command.strategy=ddp",
            kind="note" if deepspeed else "warning",  # a program may use DeepSpeed itself
        )


def _grace(given: Planned) -> Iterator[Finding]:
    """Find a grace that is too short for the slowest checkpoint of an earlier run, or longer than the job."""
    if given.facts.scheduler != "slurm":
        return
    chosen, save = grace.chosen(given.recipe, given.site, given.facts), given.files.save_s
    limit = grace.time_limit(given.facts)
    if save is not None and chosen.value < (seconds := grace.wanted(save)):
        yield Finding(
            "the grace is shorter than twice the slowest checkpoint",
            wanted=f"{seconds} s or more: a checkpoint of run {given.files.save_run} took {save:.1f} s",
            found=f"{chosen.value} s before the time limit ({chosen.why})",
            fix=f"grace_s={seconds} with dray submit; with sbatch itself --signal=B:USR1@{seconds}",
        )
    if limit and chosen.value >= limit:
        yield Finding(
            "the grace is as long as the job, so that Slurm would end the run at its start",
            wanted=f"less than {limit} s, the time limit",
            found=f"{chosen.value} s ({chosen.why})",
            fix="set a longer --time, or a shorter grace_s",
        )


def _preemption(given: Planned) -> Iterator[Finding]:
    """Find preemption that leaves no time to save, by what Slurm says of this partition."""
    facts, save = given.facts, given.files.save_s
    took = f"{save or 0:.1f} s, which a checkpoint of run {given.files.save_run} took"
    if given.recipe.train is None:
        return
    left, kill = facts.preempt_grace_s or 0, facts.kill_wait_s or 0
    if any(mode in facts.preempt_mode for mode in _ENDING):
        seen = f"PreemptMode={facts.preempt_mode}, GraceTime {left} s, KillWait {kill} s"
        fix = "save often (checkpoint.every), or use a partition without preemption"
        if save and save > left + kill:
            yield Finding("a checkpoint takes longer than preemption allows", wanted=took, found=seen, fix=fix)
        if not facts.preempt_signal and not given.files.earlier:
            yield note(
                "on this partition preemption does not send the signal that asks a run to save",
                wanted="PreemptParameters=send_user_signal, and a GraceTime, in slurm.conf",
                found=f"{seen}: SIGTERM goes to all processes at once",
                fix=fix,
            )
    if save and kill and save > kill:
        yield note(
            "scancel allows less time than a checkpoint takes",
            wanted=took,
            found=f"KillWait {kill} s",
            fix="to end such a run with a checkpoint: scancel --batch --signal=USR1 JOB",
        )


def _options(given: Planned) -> Iterator[Finding]:
    if not given.facts.login or given.files.earlier:
        return
    options = (*given.site.sbatch, *given.facts.options)
    if not any(option.startswith(_TIME) for option in options):
        yield note("the job gets one hour, the default of the batch script", fix="--sbatch=--time=08:00:00")
    if not any(option.startswith(_CORES) for option in options):
        fix = "--sbatch=--cpus-per-task=N (or --sbatch=--exclusive)"
        yield note("the job asks for no cores, and many clusters then give it one", fix=fix)


def _launcher(given: Planned) -> Iterator[Finding]:
    """A launcher that is started as every rank starts its own ranks in each."""
    argv = given.recipe.command.argv if given.recipe.command else ()
    if launcher := _LAUNCHER.match(" ".join(argv)):
        program = shlex.join(dropwhile(lambda part: not part.endswith(".py"), argv)) or "PROGRAM"
        yield Finding(
            "the command is a launcher, and would start its own ranks in every rank of this run",
            wanted="the program alone: dray starts it as every rank",
            found=launcher[0],
            fix=f"--ranks N -- {program}   (N as its --nproc-per-node; launcher=NAME says what starts the ranks)",
        )


def _plugin(given: Planned) -> Iterator[Finding]:
    plan, fabric = given.plan, given.site.fabric
    if len(plan.world.nodes) > 1 and plan.variant != "cpu" and fabric.strategy == "host" and not fabric.plugin:
        yield note(
            f"site {given.site.name} names no NCCL or RCCL plugin for {' or '.join(fabric.transport) or fabric.kind}; "
            "if the image has none, a run on several nodes ends with exit code 69",
            fix="see docs/sites.md",
        )


RULES: tuple[Callable[[Planned], Iterator[Finding]], ...] = (
    _trainer, _engine, _layer, _control_characters, _mounts, _site, _gpus, _image, _checkpoints, _compiled, _silent_cpu,
    _grace, _preemption, _options, _launcher, _plugin, _files, _memory, _deterministic,
)  # fmt: skip
"""The first finding with a code ends the run."""
