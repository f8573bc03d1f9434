"""A checkpoint on the disk: whether it is this user's and complete, and its tensors for a reader on any ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from dray.contract.findings import ConfigError, DrayError
from dray.train import manifest, positions, shards
from dray.train.config import Config
from dray.train.divergence import is_state
from dray.train.manifest import natural
from dray.train.shards import Reader, Shards, Staged, Staging, Tensors

VERSION = 3
"""The version of the manifest and its files."""


def order(config: Config, dataset: str) -> dict[str, Any]:
    """What decides which samples a step has. `dataset` tells one dataset from another."""
    return {
        "global_size": config.global_size,
        "sequence_length": config.data.sequence_length,
        "seed": config.train.seed,
        "streaming": config.data.streaming,
        "dataset": dataset,
    }


def written(
    folder: Path, staged: Staged, number: int, moved: Callable[[int], None] = lambda _size: None
) -> dict[str, Any]:
    """Write the file of that number; what a manifest says of it. `moved` hears how many bytes are written."""
    staged.wait()
    name = shards.file_of(number)
    file = manifest.written(folder / name, staged.head, staged.numbers, moved=moved)
    return {"files": {name: file}, "tensors": staged.tensors}


def joined(some: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Merge two parts of a manifest."""
    tensors = shards.joined(some["tensors"], others["tensors"])
    return {"files": {**some["files"], **others["files"]}, "tensors": tensors}


def write(folder: Path, batches: Iterable[Shards], found: dict[str, Any]) -> None:
    """Write a checkpoint outside of a run, with `found` in its manifest; one batch at a time is in memory."""
    staging = Staging(torch.device("cpu"))
    each = (written(folder, staging.fill(batch, number), number) for number, batch in enumerate(batches))
    held: dict[str, Any] = reduce(joined, each)
    manifest.write(folder, manifest.sealed({**found, "version": VERSION, **held}))


def look(path: Path) -> dict[str, Any]:
    """The manifest of this user's checkpoint, or `trouble`."""
    manifest.require_own(path)
    found = manifest.read(path)
    if "trouble" in found:
        return found
    if not manifest.is_sealed(found):
        return {"trouble": "its manifest is not what was written"}
    if found["version"] != VERSION:
        raise ConfigError(
            "the checkpoint was written by another version of dray",
            where=path / manifest.NAME,
            wanted=f"checkpoint version {VERSION}",
            found=f"checkpoint version {found['version']}, written by dray {found.get('dray')}",
            fix="resume with an image of that version; or start from its model: model.name=RUN/checkpoints/final, and "
            "another checkpoint.folder",
        )
    match found:
        case {"step": step, "updates": updates, "world_size": world, "order": dict()} if (
            path.name == f"step-{step}"
            and natural(updates)
            and natural(world)
            and 0 < world <= len(found["files"])
            and positions.is_scale(found.get("scaler"))
            and is_state(found.get("watch", {}))
        ):
            return found
    return {"trouble": "its manifest is not of this step, or not of a checkpoint"}


def wrong(path: Path, found: dict[str, Any], some: slice = slice(None)) -> list[str]:
    """What is wrong with these files and with the manifest's tensors."""
    own, tensors = found["files"], cast(Tensors, found.get("tensors"))  # until they have no faults, anything
    troubles = [*shards.faults(tensors, own)] or [*positions.faults(tensors)]
    troubles = troubles or [*manifest.wrong(path, own, some).values()]
    for name in [] if troubles else sorted(own)[some]:
        try:
            troubles += filter(None, [shards.misfit(path / name, tensors) or positions.misfit(path / name)])
        except (SafetensorError, ValueError, RecursionError) as error:
            troubles.append(f"{name}: {error}")
    return troubles


def opened(path: Path) -> Reader:
    """A checkpoint whose tensors are read without the run's ranks. One that is not whole is refused."""
    found = look(path)
    troubles = [found["trouble"]] if "trouble" in found else wrong(path, found)
    if troubles:
        raise DrayError(
            "the checkpoint is incomplete",
            wanted="the files of its manifest",
            found=f"{'; '.join(troubles[:3])} in {path}",
            fix="use another checkpoint: --step",
        )
    return Reader(path, found["tensors"])
