"""Notes on what is unwise in a run, but no reason to refuse it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from dray.config.site import Site
from dray.config.training import STRATEGIES
from dray.contract import dataset
from dray.contract.findings import Finding
from dray.facts import Facts, Files
from dray.planning.schema import Plan

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


def find(plan: Plan, site: Site, facts: Facts, files: Files) -> Iterator[Finding]:
    """Every note."""
    if facts.login and not files.earlier:
        yield from _options((*site.sbatch, *facts.options))
    yield from _gpus(plan, site)
    yield from _launchers(plan)
    yield from _deepspeed(plan)
    yield from _weights(plan)
    yield from _plugin(plan, site)
    yield from _hub(plan, files)
    for key, path in files.missing_paths.items():
        fix = "correct it, or make sure that the nodes have it; a dataset on the hub is hub:OWNER/NAME"
        yield _note(f"{key} = {path} does not exist on this machine", fix=fix)


def _note(problem: str, *, found: str = "", fix: str = "", source: str = "") -> Finding:
    return Finding(problem, found=found, fix=fix, source=source, kind="note")


def _options(options: Sequence[str]) -> Iterator[Finding]:
    if not any(option.startswith(_TIME) for option in options):
        yield _note("the job gets one hour, the default of the batch script", fix="--sbatch=--time=08:00:00")
    if not any(option.startswith(_CORES) for option in options):
        fix = "--sbatch=--cpus-per-task=N (or --sbatch=--exclusive)"
        yield _note("the job asks for no cores, and many clusters then give it one", fix=fix)


def _launchers(plan: Plan) -> Iterator[Finding]:
    """A launcher that is started as every rank starts its own ranks in each."""
    argv = plan.recipe.command.argv if plan.recipe.command else ()
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


def _deepspeed(plan: Plan) -> Iterator[Finding]:
    if plan.recipe.launcher == "deepspeed" and plan.recipe.command and plan.variant == "cpu":
        yield _note(
            "on a CPU transformers' Trainer and accelerate silently train without DeepSpeed",
            found="image = cpu",
            fix="image=cuda; only a program that calls deepspeed.initialize itself uses DeepSpeed on a CPU",
        )


def _gpus(plan: Plan, site: Site) -> Iterator[Finding]:
    if plan.variant != "cpu" and site.image not in (None, plan.variant):
        why = " ".join(site.why.get("image", "").split())
        yield _note(f"site {site.name} has GPUs for image={site.image}", found=f"image={plan.variant}", source=why)
    if plan.recipe.train and plan.recipe.train.precision == "bf16" and plan.variant == "cuda12" and site.bf16:
        fix = "train.precision=fp16, and bf16 = false in the site file"
        yield _note("GPUs before A100 (V100) emulate bf16", fix=fix)


def _weights(plan: Plan) -> Iterator[Finding]:
    train, lora = plan.recipe.train, plan.recipe.lora
    if train is None or STRATEGIES[train.strategy].deepspeed or (lora and lora.enabled):
        return
    if plan.recipe.model.dtype == "bf16":
        fix = "model.dtype=fp32 (train.precision stays)"
        yield _note("16-bit weights lose updates that are much smaller", found="model.dtype = bf16", fix=fix)


def _plugin(plan: Plan, site: Site) -> Iterator[Finding]:
    fabric = site.fabric
    if len(plan.world.nodes) > 1 and plan.variant != "cpu" and fabric.strategy == "host" and not fabric.plugin:
        yield _note(
            f"site {site.name} names no NCCL or RCCL plugin for {' or '.join(fabric.transport) or fabric.kind}; "
            "if the image has none, a run on several nodes ends with exit code 69",
            fix="see docs/sites.md",
        )


def _hub(plan: Plan, files: Files) -> Iterator[Finding]:
    """A job is offline, and fails at its start when something is missing."""
    environment = {variable.name: variable.value for variable in plan.env}
    if environment.get("HF_HUB_OFFLINE") != "1":
        return
    for key, name in plan.recipe.datasets().items() if plan.recipe.train else ():
        if dataset.parse(name).files.startswith("hf://"):
            fix = 'set env.HF_HUB_OFFLINE = "0" in the recipe if the nodes reach the hub'
            yield _note(f"{key} is read from the hub, and the job is offline", found=name, fix=fix)
    if not files.missing_on_hub:
        return
    found = f"not in HF_HOME ({environment.get('HF_HOME', 'not set')}): {', '.join(files.missing_on_hub)}"
    yield _note("the job is offline, and files that it needs are not downloaded", found=found, fix=_PREFETCH)


_PREFETCH = "dray prefetch RECIPE"
