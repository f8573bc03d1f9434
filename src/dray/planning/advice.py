"""What a user should hear before a job waits in a queue, beside what refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dray.config.site import Site
from dray.config.training import STRATEGIES
from dray.planning.plan import Plan

_TIME = ("--time", "-t")
_CORES = ("--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive")


def lines(plan: Plan, site: Site, options: Sequence[str] = ()) -> str:
    """A line each."""
    said = [
        *_asked(site, options),
        *_gpus(plan, site),
        *_weights(plan),
        *_fabric(plan, site),
        *_hub(plan),
        *_texts(plan),
    ]
    return "".join(f"dray: note: {one}\n" for one in said)


def _asked(site: Site, options: Sequence[str]) -> Iterator[str]:
    asked = (*site.sbatch, *options)
    if not any(option.startswith(_TIME) for option in asked):
        yield "the job has one hour, unless sbatch is told otherwise: --sbatch=--time=08:00:00"
    if not any(option.startswith(_CORES) for option in asked):
        yield "no cores are asked for, and many clusters then give one: --sbatch=--cpus-per-task=N (or --exclusive)"


def _gpus(plan: Plan, site: Site) -> Iterator[str]:
    if plan.variant != "cpu" and site.image not in (None, plan.variant):
        yield f"site {site.name} has GPUs for image={site.image}; image={plan.variant} is for others"
    if plan.recipe.train and plan.recipe.train.precision == "bf16" and "cuda12" in (plan.variant, site.image):
        yield "GPUs before A100 have no bf16: train.precision=fp16"


def _weights(plan: Plan) -> Iterator[str]:
    recipe = plan.recipe
    small = (
        recipe.train and not STRATEGIES[recipe.train.strategy].deepspeed and not (recipe.lora and recipe.lora.enabled)
    )
    if small and recipe.model.dtype == "bf16":
        yield "weights of 16 bits lose changes that are small beside them: model.dtype=fp32 (train.precision stays)"


def _fabric(plan: Plan, site: Site) -> Iterator[str]:
    fabric = site.fabric
    if len(plan.world.nodes) > 1 and plan.variant != "cpu" and fabric.strategy == "host" and not fabric.plugin:
        yield (
            f"site {site.name} names no NCCL or RCCL plugin for {' or '.join(fabric.transport) or fabric.kind}; "
            "without one in the image several nodes end with 69 (docs/fabric.md)"
        )


def _hub(plan: Plan) -> Iterator[str]:
    """A job is offline, and learns only when it runs that something is not there."""
    recipe, known = plan.recipe, {variable.name: variable.value for variable in plan.env}
    if recipe.train is None or known.get("HF_HUB_OFFLINE") != "1":
        return
    texts = [
        said.removeprefix("hub:").partition(":")[0] for said in recipe.datasets().values() if said.startswith("hub:")
    ]
    models = [said for said in (recipe.model.name, recipe.model.tokenizer) if said and said[0] not in "/."]
    home, missing = known.get("HF_HOME", ""), []
    for kind, said in (("models", models), ("datasets", texts)):
        for name in dict.fromkeys("--".join(one.split("/")[:2]) for one in said):
            if not home or not Path(home, "hub", f"{kind}--{name}").is_dir():
                missing.append(name.replace("--", "/"))
    if missing:
        why = f"not in HF_HOME ({home}), as it is seen here" if home else "not there, since HF_HOME is not set"
        yield f"the job is offline, and what it needs is {why}: {', '.join(missing)}; dray prefetch RECIPE brings it"


def _texts(plan: Plan) -> Iterator[str]:
    for key, named in plan.recipe.places().items():
        if "*" not in named and not Path(named).exists():
            yield f"{key} = {named} is not here; the nodes must have it (what the hub has is hub:OWNER/NAME)"
