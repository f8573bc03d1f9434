"""A checkpoint on the disk: write it, check that it is this user's and complete, and load it on any ranks.

A stream's positions in the data are tensors of whole numbers beside the weights. Any rank reads those alone that it
goes on with, however many ranks wrote them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.contract.unexpected import MENDED
from dray.train.checkpoint import manifest, shards
from dray.train.checkpoint.manifest import natural
from dray.train.checkpoint.shards import MismatchError, Reader, Shard, Shards, Staged, Staging, Tensors
from dray.train.config import Config
from dray.train.parallel.base import Strategy

VERSION = 3
"""The version of the manifest and its files."""
_FEED = "feed."
_MORE = 1 << 20  # bytes beside the tensors: the manifest


def order(config: Config, dataset: str) -> dict[str, Any]:
    """What decides which samples a step has. `dataset` tells one dataset from another."""
    return {
        "global_size": config.global_size,
        "sequence_length": config.data.sequence_length,
        "seed": config.train.seed,
        "streaming": config.data.streaming,
        "dataset": dataset,
    }


def require_order(own: dict[str, Any], path: Path, saved: dict[str, Any]) -> None:
    """Refuse another batch, sequence length, seed or dataset: the order of samples would differ."""
    for name, value in own.items():
        if saved.get(name) != value:
            raise ConfigError(
                "the data order differs from the checkpoint's",
                wanted=f"{name} = {saved.get(name)}, as in {path}",
                found=f"{name} = {value}",
                fix="restore it, or start anew: another checkpoint.folder, and model.name = a final model's folder",
            )


def positions(states: list[Any] | None) -> Shards:
    """One tensor per stream shard: the part that it reads, documents taken of it, and tokens left over."""
    found = {}
    for number, part, taken, left in states or ():
        values = torch.from_numpy(np.concatenate([np.array([part, taken], np.int64), np.asarray(left, np.int64)]))
        found[f"{_FEED}{number}"] = Shard((len(values),), 0, values)
    return found


class Positions(Mapping[int, list[Any]]):
    """By a stream shard's number. Each is read when it is asked for, and no file stays open."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._folder = folder
        self._tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_FEED)}

    def __getitem__(self, number: int) -> list[Any]:
        name = f"{_FEED}{number}"
        if name not in self._tensors:
            raise KeyError(number)
        values = torch.empty(self._tensors[name]["shape"], dtype=torch.int64)
        Reader(self._folder, self._tensors).fill({name: Shard(tuple(values.shape), 0, values)})
        part, taken, *_ = values.tolist()
        return [number, part, taken, values[2:].numpy()]

    def __iter__(self) -> Iterator[int]:
        return (int(name.removeprefix(_FEED)) for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


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


def write(folder: Path, batches: Iterable[Shards], about: dict[str, Any]) -> None:
    """Write a checkpoint outside of a run, with `about` in its manifest; one batch at a time is in memory."""
    staging = Staging(torch.device("cpu"))
    each = (written(folder, staging.fill(batch, number), number) for number, batch in enumerate(batches))
    held: dict[str, Any] = reduce(joined, each)
    manifest.write(folder, manifest.sealed({**about, "version": VERSION, **held}))


def require_room(folder: Path, size: int, newest: str) -> None:
    """Refuse if the disk lacks room for `size` bytes; a quota shows only while writing."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < size + _MORE:  # some file systems do not tell
        raise UnfitError(
            "the checkpoint does not fit on the disk",
            where=folder,
            wanted=f"{size / 1e9:.4g} GB",
            found=f"{os.strerror(errno.ENOSPC)} ({free / 1e9:.4g} GB free, {size / 1e9:.4g} GB needed)",
            fix=f"make room on that disk; {newest}",
        )


def failed(error: BaseException, folder: Path, newest: str) -> DrayError:
    """The checkpoint's failure; UnfitError (69) where the run may go on until the disk is mended."""
    mended = isinstance(error, OSError) and error.errno in MENDED
    found = " ".join(str(error).split())[-300:] or type(error).__name__
    if mended and isinstance(error, OSError) and error.errno != errno.EIO:
        found = error.strerror or found
    return (UnfitError if mended else DrayError)(
        "the checkpoint cannot be written",
        wanted=f"room and permission to write in {folder}",
        found=found,
        fix=f"check the disk and its quota; {newest}",
    )


def look(path: Path) -> dict[str, Any]:
    """The manifest of this user's checkpoint, or `trouble`."""
    manifest.require_own(path)
    found = manifest.read(path)
    if "trouble" in found:
        return found
    sealed = manifest.is_sealed(found)
    if found["version"] != VERSION and (sealed or manifest.SEAL not in found):  # versions 1 and 2 had no seal
        raise ConfigError(
            "the checkpoint was written by another version of dray",
            where=path / manifest.NAME,
            wanted=f"checkpoint version {VERSION}",
            found=f"checkpoint version {found['version']}, written by dray {found.get('dray')}",
            fix="resume with an image of that version; or start from its model: model.name=RUN/checkpoints/final, and "
            "another checkpoint.folder",
        )
    if not sealed:
        return {"trouble": "its manifest is not what was written"}
    match found:
        case {"step": step, "updates": updates, "world_size": world, "order": dict()} if (
            path.name == f"step-{step}"
            and natural(updates)
            and natural(world)
            and 0 < world <= len(found["files"])
            and _is_scale(found.get("scaler"))
        ):
            return found
    return {"trouble": "its manifest is not of this step, or not of a checkpoint"}


def _is_scale(state: Any) -> bool:  # noqa: ANN401  any JSON value
    """Whether it is what a loss scale goes on from, or null."""
    match state:
        case None | [int() | float(), int(), int()]:
            return True
    return False


def wrong(path: Path, found: dict[str, Any], some: slice = slice(None)) -> list[str]:
    """What is wrong with these files and with the manifest's tensors."""
    own, tensors = found["files"], cast(Tensors, found.get("tensors"))  # until they have no faults, anything
    troubles = [*shards.faults(tensors, own)] or [*_position_faults(tensors)]
    troubles = troubles or [*manifest.wrong(path, own, some).values()]
    for name in [] if troubles else sorted(own)[some]:
        try:
            troubles += filter(None, [shards.misfit(path / name, tensors) or _position_misfit(path / name)])
        except (SafetensorError, ValueError, RecursionError) as error:
            troubles.append(f"{name}: {error}")
    return troubles


def _position_faults(tensors: Tensors) -> Iterator[str]:
    """The manifest's tensors that are named as positions but cannot be."""
    for name, tensor in tensors.items():
        shaped = tensor["dtype"] == "I64" and len(tensor["shape"]) == 1 and tensor["shape"][0] > 1
        if name.startswith(_FEED) and not (shaped and name.removeprefix(_FEED).isdecimal()):
            yield f"tensor {name} is not a position in the data"


def _position_misfit(path: Path) -> str:
    """Why the positions in a file are invalid; empty if they are valid."""
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(_FEED)]  # noqa: SIM118  it is no dict
        wrong = any(bool((file.get_tensor(name) < 0).any()) for name in names)
    return f"{path.name} holds a negative position in the data" if wrong else ""


def load(strategy: Strategy, path: Path, found: dict[str, Any]) -> Positions:
    """Load a checkpoint that has been checked into weights, optimizer and loss scale; all ranks together."""
    if strategy.scaler and found.get("scaler"):
        strategy.scaler.load(found["scaler"])
    try:
        strategy.load(Reader(path, found["tensors"]), found["updates"])
    except MismatchError as error:
        raise ConfigError(
            "the checkpoint is of another model",
            wanted="the tensors of this recipe's model",
            found=f"in {path}: {error}",
            fix="set another checkpoint.folder, or use the recipe that made the checkpoint",
        ) from error
    return Positions(path, found["tensors"])


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
