"""What is unwise in a run, but no reason to refuse it: a list of rules."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from dray.config.training import STRATEGIES
from dray.contract import dataset
from dray.contract.findings import Finding
from dray.planning import accelerate, grace
from dray.planning.rule import Planned, Rule, note

_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate-launch", "horovodrun")
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)
_TIME = ("--time", "-t")
_CORES = ("--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive")


def _options(given: Planned) -> Iterator[Finding]:
    if not given.facts.login or given.files.earlier:
        return
    options = (*given.site.sbatch, *given.facts.options)
    if not any(option.startswith(_TIME) for option in options):
        yield note("the job gets one hour, the default of the batch script", fix="--sbatch=--time=08:00:00")
    if not any(option.startswith(_CORES) for option in options):
        fix = "--sbatch=--cpus-per-task=N (or --sbatch=--exclusive)"
        yield note("the job asks for no cores, and many clusters then give it one", fix=fix)


def _gpus(given: Planned) -> Iterator[Finding]:
    site, variant, train = given.site, given.plan.variant, given.recipe.train
    if variant != "cpu" and site.image not in (None, variant):
        why = " ".join(site.why.get("image", "").split())
        yield note(f"site {site.name} has GPUs for image={site.image}", found=f"image={variant}", source=why)
    if train and train.precision == "bf16" and variant == "cuda12" and site.bf16:
        fix = "train.precision=fp16, and bf16 = false in the site file"
        yield note("GPUs before A100 (V100) emulate bf16", fix=fix)


def _launcher(given: Planned) -> Iterator[Finding]:
    """A launcher that is started as every rank starts its own ranks in each."""
    argv = given.recipe.command.argv if given.recipe.command else ()
    named = [PurePosixPath(part).name if number == 0 else part for number, part in enumerate(argv)]
    if not named:
        return
    module = named[2] if re.fullmatch(r"python[\d.]*", named[0]) and named[1:2] == ["-m"] and named[2:] else ""
    if named[0] not in _LAUNCHERS and module not in _MODULES and named[:2] != ["accelerate", "launch"]:
        return
    program = next((argv[number:] for number, part in enumerate(argv) if number and part.endswith(".py")), ("PROGRAM",))
    yield Finding(
        "the command is a launcher, and would start its own ranks in every rank of this run",
        wanted="the program alone: dray starts it as every rank",
        found=" ".join(argv[: 3 if module else 1 if named[0] in _LAUNCHERS else 2]),
        fix=f"--ranks N -- {shlex.join(program)}   (N as its --nproc-per-node; --launcher says what starts the ranks)",
    )


def _deepspeed(given: Planned) -> Iterator[Finding]:
    if given.recipe.launcher == "deepspeed" and given.recipe.command and given.plan.variant == "cpu":
        yield note(
            "on a CPU transformers' Trainer and accelerate silently train without DeepSpeed",
            found="image = cpu",
            fix="image=cuda; only a program that calls deepspeed.initialize itself uses DeepSpeed on a CPU",
        )


def _weights(given: Planned) -> Iterator[Finding]:
    train = given.recipe.train
    if train is None or STRATEGIES[train.strategy].deepspeed or given.recipe.has_lora:
        return
    if given.recipe.model.dtype == "bf16":
        fix = "model.dtype=fp32 (train.precision stays)"
        yield note("16-bit weights lose updates that are much smaller", found="model.dtype = bf16", fix=fix)


def _plugin(given: Planned) -> Iterator[Finding]:
    plan, fabric = given.plan, given.site.fabric
    if len(plan.world.nodes) > 1 and plan.variant != "cpu" and fabric.strategy == "host" and not fabric.plugin:
        yield note(
            f"site {given.site.name} names no NCCL or RCCL plugin for {' or '.join(fabric.transport) or fabric.kind}; "
            "if the image has none, a run on several nodes ends with exit code 69",
            fix="see docs/sites.md",
        )


def _hub(given: Planned) -> Iterator[Finding]:
    """A job is offline, and fails at its start when something is missing."""
    environment = {variable.name: variable.value for variable in given.plan.env}
    if environment.get("HF_HUB_OFFLINE") != "1":
        return
    for key, name in given.recipe.datasets().items() if given.recipe.train else ():
        if dataset.parse(name).files.startswith("hf://"):
            fix = 'set env.HF_HUB_OFFLINE = "0" in the recipe if the nodes reach the hub'
            yield note(f"{key} is read from the hub, and the job is offline", found=name, fix=fix)
    if given.files.missing_on_hub:
        missing = f"not in HF_HOME ({environment.get('HF_HOME', 'not set')}): {', '.join(given.files.missing_on_hub)}"
        fix = "dray prefetch RECIPE"
        yield note("the job is offline, and files that it needs are not downloaded", found=missing, fix=fix)


def _paths(given: Planned) -> Iterator[Finding]:
    for key, path in given.files.missing_paths.items():
        fix = "correct it, or make sure that the nodes have it; a dataset on the hub is hub:OWNER/NAME"
        yield note(f"{key} = {path} does not exist on this machine", fix=fix)


RULES: tuple[Rule, ...] = (
    accelerate.advice, grace.advice, _options, _gpus, _launcher, _deepspeed, _weights, _plugin, _hub, _paths,
)  # fmt: skip
