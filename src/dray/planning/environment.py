"""The environment of every rank: each variable with its value, who set it and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from dray import engines
from dray.config.image_definition import ACCELERATORS
from dray.config.recipe import Recipe
from dray.config.site import Fabric, Site
from dray.facts import Facts
from dray.planning.schema import Variable

CACHES = ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "WANDB_DIR")
"""Folders in which libraries keep what they download or make."""
# By which Slurm says whose GPUs a job has, where nothing else keeps it from the others'. ROCm reads CUDA's name too,
# and numbers anew what is left: of two such lists the second would name GPUs that are not there.
_VISIBLE = {"cpu": (), "cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("ROCR_VISIBLE_DEVICES",)}
# torch reads one of them, and its newer name beats the older, which every version knows.
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
_KEPT = "downloads are kept for the next run, beside the runs, on a disk that all nodes share"
_SHARED = "compile caches race on a shared disk"
_ALWAYS = (
    ("HF_HUB_OFFLINE", "1", "compute nodes are offline; without it each missing file costs 48 s of retries"),
    ("PYTHONFAULTHANDLER", "1", "a crash or a hang writes the stack of each thread to the rank's log"),
    ("PYTHONNOUSERSITE", "1", "packages in ~/.local must not hide the image's"),
    ("PYTHONUNBUFFERED", "1", "a rank's last lines must be in its log when it dies"),
    ("TOKENIZERS_PARALLELISM", "false", "tokenizers' threads and forked data workers deadlock"),
    ("TRITON_CACHE_AUTOTUNING", "1", "tuning is kept with the compiled kernels for the next attempt"),
)
Row = tuple[str, str, str]
"""A variable of dray: its name, its value and why it has it."""


class Setting(NamedTuple):
    """A variable, the values with which two runs agree (the first is dray's own), and why it must have one of them."""

    name: str
    values: tuple[str, ...]
    why: str


_GPU = (
    Setting("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"), "cuBLAS would sum in an order that its streams decide"),
    Setting("NCCL_ALGO", ("Ring", "Tree"), "NCCL would choose an algorithm by size, and a switch may sum in any order"),
    Setting("NCCL_PROTO", ("Simple", "LL", "LL128"), "NCCL would choose a protocol by size and topology"),
)
_COMPILED = (
    Setting("TORCHINDUCTOR_DETERMINISTIC", ("1",), "Inductor would choose the reduction that was fastest just now"),
    *(
        Setting(f"TORCHINDUCTOR_{name}", ("0",), "tuning would choose the kernel that was fastest just now")
        for name in ("COORDINATE_DESCENT_TUNING", "MAX_AUTOTUNE", "MAX_AUTOTUNE_GEMM", "MAX_AUTOTUNE_POINTWISE")
    ),
)
_FLASH = Setting("FLASH_ATTENTION_DETERMINISTIC", ("1",), "flash attention would add gradients by atomics")
_ANALOG = Setting("AIHWKIT_USE_TRITON", ("",), "aihwkit-lightning's Triton kernels would add by atomics")


def deterministic(recipe: Recipe) -> Iterator[Setting]:
    """The settings of train.deterministic, with which two runs agree to the last bit."""
    if not recipe.train or not recipe.train.deterministic:
        return
    if recipe.train.compile:
        yield from _COMPILED
    if recipe.image != "cpu":  # on a CPU sums have one order without any
        yield from _GPU
        if recipe.model.attn_implementation == "flash_attention_2":
            yield _FLASH
        if recipe.has_analog:
            yield _ANALOG


def resolve(
    recipe: Recipe, site: Site, facts: Facts, fabric: Fabric, *, run_folder: str, scratch: str
) -> tuple[Variable, ...]:
    """All variables by name. The recipe wins over the site, the site over dray; `beats` keeps the replaced values.

    Variables in pass_env have the job's value, and are not decided here.
    """
    ours = (*_ours(recipe, site, facts, run_folder, scratch), *_caches(facts, PurePosixPath(run_folder), scratch))
    chosen: dict[str, Variable] = {}
    for variable in (
        *(Variable(name=name, value=value, source="dray", why=why) for name, value, why in ours),
        *_sites(site, facts, fabric),
        *_recipes(recipe, facts),
    ):
        beaten = chosen.get(variable.name)
        beats = (*beaten.beats, f"{beaten.value} ({beaten.source})") if beaten else ()
        chosen[variable.name] = variable.model_copy(update={"beats": beats})
    return tuple(chosen[name] for name in sorted(chosen.keys() - set(recipe.pass_env)))


def passed(recipe: Recipe) -> tuple[str, ...]:
    """The names of the variables that the ranks take from the job."""
    visible = (name for name in _VISIBLE[ACCELERATORS[recipe.image]] if name not in recipe.env)
    return tuple(dict.fromkeys((*recipe.pass_env, *visible)))


def caches(facts: Facts, runs: PurePosixPath) -> PurePosixPath:
    """This user's cache folder beside the runs, whose folder several users may share."""
    return runs / f".cache-{facts.uid}"


def hub(facts: Facts, runs: PurePosixPath) -> str:
    """The job's HF_HOME, for models and datasets of the Hugging Face hub."""
    return facts.hf_home or str(caches(facts, runs) / "huggingface")


def _ours(recipe: Recipe, site: Site, facts: Facts, run_folder: str, scratch: str) -> Iterator[Row]:
    accelerator = ACCELERATORS[recipe.image]
    yield from _ALWAYS
    yield "TORCHINDUCTOR_CACHE_DIR", f"{scratch}/inductor", _SHARED
    yield "TORCH_EXTENSIONS_DIR", f"{scratch}/extensions", _SHARED
    yield "TRITON_HOME", scratch, "Triton's other folders, which are in the home by default"
    if facts.adopted_path:
        yield "PYTHONPATH", facts.adopted_path, "the adopted image lacks dray"
    if recipe.command:
        yield "DRAY_RUN", run_folder, "the run's folder, for what the command writes; all attempts share it"
    if recipe.train:
        yield "TORCH_GLOO_LAZY_INIT", "1", "a rank connects to 2 log2 N others as it needs them, not to all N"
        decided = {*recipe.env, *recipe.pass_env, *(setting.name for setting in site.env)}
        if accelerator == "cuda" and not decided & _ALLOCATOR:
            why = (
                "freed memory serves tensors of any size; not with ROCm 6.4, nor in programs that share it by CUDA IPC"
            )
            yield "PYTORCH_ALLOC_CONF", "expandable_segments:True", why
        if recipe.image in ("cuda12", "rocm", "rocm6"):
            yield "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "a hang shows collectives; the default in newer torch"
    for setting in deterministic(recipe):
        yield setting.name, setting.values[0], setting.why
    if accelerator == "rocm":
        for name in ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"):
            yield name, f"{scratch}/miopen", "MIOpen's SQLite locks fail on a shared disk"
    if recipe.image == "cpu":
        yield "ACCELERATE_USE_CPU", "true", "without it accelerate looks for GPUs"
        yield "CUDA_VISIBLE_DEVICES", "", "the cpu image cannot use GPUs that the node may have"


def _caches(facts: Facts, run_folder: PurePosixPath, scratch: str) -> Iterator[Row]:
    """The cache folders: the job's own if it names them; else downloads go beside the runs, the rest to the node."""
    beside = caches(facts, run_folder.parent)
    given = {**facts.shell, "HF_HOME": facts.hf_home or ""}
    at_home = engines.get(facts.engine).image == "python"  # it sees all that the user has
    for name, path, why in (
        ("HF_HOME", f"{beside}/huggingface", _KEPT),
        ("TORCH_HOME", f"{beside}/torch", _KEPT),
        ("XDG_CACHE_HOME", str(beside), _KEPT),
        ("MPLCONFIGDIR", f"{scratch}/matplotlib", "matplotlib's list of fonts takes seconds to make"),
        ("TRITON_CACHE_DIR", f"{scratch}/triton", _SHARED),
        ("WANDB_DIR", str(run_folder), "offline runs of Weights & Biases are kept with the run"),
    ):
        if given.get(name, "").startswith("/"):
            yield name, given[name], "the job's own"
        elif not at_home or path.startswith(scratch):
            yield name, path, why


def _sites(site: Site, facts: Facts, fabric: Fabric) -> Iterator[Variable]:
    source = f"site {site.name}"
    if fabric.image_plugin:
        why = "the image's own plugin; NCCL or RCCL may find another by itself"
        yield Variable(name="NCCL_NET_PLUGIN", value=fabric.image_plugin, source=source, why=why)
    for setting in site.env:
        if setting.nodes in ("any", "several" if facts.nodes > 1 else "one"):
            yield Variable(name=setting.name, value=setting.value, source=source, why=setting.why)


def _recipes(recipe: Recipe, facts: Facts) -> Iterator[Variable]:
    for name, value in recipe.env.items():
        # Without its folder an adopted image has no dray.
        behind = f":{facts.adopted_path}" if name == "PYTHONPATH" and facts.adopted_path else ""
        yield Variable(name=name, value=value + behind, source="recipe")
