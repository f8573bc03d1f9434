"""The environment of every rank: each variable with its value, who set it and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict

from dray.config.image import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Fabric, Site
from dray.facts import Facts
from dray.planning import caches, deterministic

# By which Slurm says whose GPUs a job has, where nothing else keeps it from the others'. ROCm reads CUDA's name too,
# and numbers anew what is left: of two such lists the second would name GPUs that are not there.
_VISIBLE = {"cpu": (), "cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("ROCR_VISIBLE_DEVICES",)}
# torch reads one of them, and its newer name beats the older, which every version knows.
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


class Variable(BaseModel):
    """A variable of the ranks, and the values that it replaced."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """The variable's name."""
    value: str
    """The value that the ranks see."""
    source: str
    """Who set it: dray, the site or the recipe."""
    why: str = ""
    """Why it has this value."""
    beats: tuple[str, ...] = ()
    """The values that it replaced, each with its source."""


def resolve(
    recipe: Recipe, site: Site, facts: Facts, fabric: Fabric, *, run_folder: str, scratch: str
) -> tuple[Variable, ...]:
    """All variables by name. The recipe wins over the site, the site over dray; `beats` keeps the replaced values.

    Variables in pass_env have the job's value, and are not decided here.
    """
    chosen: dict[str, Variable] = {}
    for layer in (
        _ours(recipe, site, facts, run_folder, scratch),
        _sites(site, facts, fabric),
        _recipes(recipe, facts),
    ):
        for variable in layer:
            beaten = chosen.get(variable.name)
            if beaten is not None:
                beats = (*beaten.beats, f"{beaten.value} ({beaten.source})")
                variable = variable.model_copy(update={"beats": beats})  # noqa: PLW2901
            chosen[variable.name] = variable
    return tuple(chosen[name] for name in sorted(chosen.keys() - set(recipe.pass_env)))


def passed(recipe: Recipe) -> tuple[str, ...]:
    """The names of the variables that the ranks take from the job."""
    visible = (name for name in _VISIBLE[ACCELERATORS[recipe.image]] if name not in recipe.env)
    return tuple(dict.fromkeys((*recipe.pass_env, *visible)))


def _ours(recipe: Recipe, site: Site, facts: Facts, run_folder: str, scratch: str) -> Iterator[Variable]:
    def ours(name: str, value: str, why: str) -> Variable:
        return Variable(name=name, value=value, source="dray", why=why)

    yield ours("HF_HUB_OFFLINE", "1", "compute nodes are offline; without it each missing file costs 48 s of retries")
    yield ours("PYTHONFAULTHANDLER", "1", "a crash or a hang writes the stack of each thread to the rank's log")
    yield ours("PYTHONNOUSERSITE", "1", "packages in ~/.local must not hide the image's")
    yield ours("PYTHONUNBUFFERED", "1", "a rank's last lines must be in its log when it dies")
    yield ours("TOKENIZERS_PARALLELISM", "false", "tokenizers' threads and forked data workers deadlock")
    yield ours("TORCHINDUCTOR_CACHE_DIR", f"{scratch}/inductor", "compile caches race on a shared disk")
    yield ours("TORCH_EXTENSIONS_DIR", f"{scratch}/extensions", "compile caches race on a shared disk")
    yield ours("TRITON_CACHE_AUTOTUNING", "1", "tuning is kept with the compiled kernels for the next attempt")
    yield ours("TRITON_HOME", scratch, "Triton's other folders, which are in the home by default")
    if facts.adopted_path:
        yield ours("PYTHONPATH", facts.adopted_path, "the adopted image lacks dray")
    if recipe.command:
        yield ours("DRAY_RUN", run_folder, "the run's folder, for what the command writes; all attempts share it")
    for cache in caches.chosen(facts, run_folder=PurePosixPath(run_folder), scratch=scratch):
        yield ours(*cache)
    if recipe.train and ACCELERATORS[recipe.image] == "cuda" and not _names(recipe, site) & _ALLOCATOR:
        why = "freed memory serves tensors of any size; not with ROCm 6.4, nor in programs that share it by CUDA IPC"
        yield ours("PYTORCH_ALLOC_CONF", "expandable_segments:True", why)
    if recipe.train and recipe.image in ("cuda12", "rocm", "rocm6"):
        yield ours(
            "TORCH_NCCL_TRACE_BUFFER_SIZE",
            "2000",
            "a hang shows collectives; the default in newer torch",
        )
    if recipe.train:
        yield ours("TORCH_GLOO_LAZY_INIT", "1", "a rank connects to 2 log2 N others as it needs them, not to all N")
    for setting in deterministic.settings(recipe):
        yield ours(setting.name, setting.values[0], setting.why)
    if ACCELERATORS[recipe.image] == "rocm":
        for name in ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"):
            yield ours(name, f"{scratch}/miopen", "MIOpen's SQLite locks fail on a shared disk")
    if recipe.image == "cpu":
        yield ours("ACCELERATE_USE_CPU", "true", "without it accelerate looks for GPUs")
        yield ours("CUDA_VISIBLE_DEVICES", "", "the cpu image cannot use GPUs that the node may have")


def _sites(site: Site, facts: Facts, fabric: Fabric) -> Iterator[Variable]:
    if fabric.image_plugin:
        why = "the image's own plugin; NCCL or RCCL may find another by itself"
        yield Variable(name="NCCL_NET_PLUGIN", value=fabric.image_plugin, source=f"site {site.name}", why=why)
    several = "several" if facts.nodes > 1 else "one"
    for setting in site.env:
        if setting.nodes not in ("any", several):
            continue
        yield Variable(name=setting.name, value=setting.value, source=f"site {site.name}", why=setting.why)


def _names(recipe: Recipe, site: Site) -> set[str]:
    """The names of the variables that recipe, job or site decide."""
    return {*recipe.env, *recipe.pass_env, *(setting.name for setting in site.env)}


def _recipes(recipe: Recipe, facts: Facts) -> Iterator[Variable]:
    for name, value in recipe.env.items():
        # Without its folder an adopted image has no dray.
        behind = f":{facts.adopted_path}" if name == "PYTHONPATH" and facts.adopted_path else ""
        yield Variable(name=name, value=value + behind, source="recipe")
