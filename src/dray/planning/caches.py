"""The folders in which libraries keep what they download or make: a writable one for each, without a setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from dray import engines
from dray.facts import Facts

NAMES = ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "WANDB_DIR")
_KEPT = "downloads are kept for the next run, beside the runs, on a disk that all nodes share"


class Cache(NamedTuple):
    """A variable that names a cache folder."""

    name: str
    path: str
    why: str


def kept(facts: Facts, runs: PurePosixPath) -> PurePosixPath:
    """This user's cache folder beside the runs, whose folder several users may share."""
    return runs / f".cache-{facts.uid}"


def hub(facts: Facts, runs: PurePosixPath) -> str:
    """The job's HF_HOME, for models and datasets of the Hugging Face hub."""
    return facts.hf_home or str(kept(facts, runs) / "huggingface")


def chosen(facts: Facts, *, run_folder: PurePosixPath, scratch: str) -> Iterator[Cache]:
    """The cache folders: the job's own if it names them; else downloads go beside the runs, the rest to the node."""
    beside = kept(facts, run_folder.parent)
    hub_why = "the job's own, or this user's cache; all nodes read models and datasets in it"
    usual = (
        Cache("HF_HOME", hub(facts, run_folder.parent), hub_why if facts.hf_home else _KEPT),
        Cache("TORCH_HOME", str(beside / "torch"), _KEPT),
        Cache("XDG_CACHE_HOME", str(beside), _KEPT),
        Cache("MPLCONFIGDIR", f"{scratch}/matplotlib", "matplotlib's list of fonts takes seconds to make"),
        Cache("TRITON_CACHE_DIR", f"{scratch}/triton", "compile caches race on a shared disk"),
        Cache("WANDB_DIR", str(run_folder), "offline runs of Weights & Biases are kept with the run"),
    )
    at_home = engines.get(facts.engine).image == "python"  # it sees all that the user has
    for cache in usual:
        given = facts.shell.get(cache.name, "")
        if cache.name != "HF_HOME" and given.startswith("/"):
            yield Cache(cache.name, given, "the job's own")
        elif not at_home or cache.path.startswith(scratch) or (cache.name == "HF_HOME" and facts.hf_home):
            yield cache


def outside(
    variables: Iterable[tuple[str, str]], facts: Facts, *, run_folder: PurePosixPath, scratch: str
) -> Iterator[Cache]:
    """The cache folders that need a bind: those outside of the run folder and the node's own folder."""
    bound = (f"{run_folder}/", f"{scratch}/")
    beside = str(kept(facts, run_folder.parent))
    for name, value in variables:
        if name not in NAMES or not value.startswith("/") or f"{value}/".startswith(bound):
            continue
        if f"{value}/".startswith(f"{beside}/"):
            yield Cache("dray", beside, "the caches of libraries")
        else:
            yield Cache(name, value, "what its library downloads or makes")
