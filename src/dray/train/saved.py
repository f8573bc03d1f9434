"""A checkpoint on the disk: whether it is this user's and complete, and its tensors for a reader on any ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dray.contract.findings import ConfigError, DrayError
from dray.train import manifest, shards
from dray.train.config import Config
from dray.train.divergence import is_state
from dray.train.manifest import natural
from dray.train.shards import Reader, Shards, Staging

VERSION = 2
"""Of the manifest, and of what the files beside it hold."""
OF_DCP = 1
"""torch's distributed checkpoints, which dray wrote before."""


def files(rank: int) -> tuple[str, str]:
    """What a rank writes: its tensors, and its position in the data."""
    return f"rank-{rank}.safetensors", f"rank-{rank}.json"


def order(config: Config, dataset: str) -> dict[str, Any]:
    """What decides which samples a step has. `dataset` tells one dataset from another."""
    return {
        "global_size": config.global_size,
        "sequence_length": config.data.sequence_length,
        "seed": config.train.seed,
        "streaming": config.data.streaming,
        "dataset": dataset,
    }


def write(folder: Path, batches: Iterable[Shards], positions: Sequence[bytes], found: dict[str, Any]) -> None:
    """A checkpoint that no ranks write, whose manifest begins with `found`; a batch at a time is in memory."""
    staging, tensors = Staging(torch.device("cpu")), {}
    sums = {files(rank)[1]: manifest.written(folder / files(rank)[1], own) for rank, own in enumerate(positions)}
    for number, batch in enumerate(batches):
        staged, name = staging.fill(batch), f"converted-{number}.safetensors"
        sums[name] = manifest.written(folder / name, staged.head, staged.numbers)
        tensors[name] = staged.tensors
    joined = shards.joined([*tensors.values()], [*tensors])
    manifest.write(folder, {**found, "version": VERSION, "files": sums, "tensors": joined})


def look(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint of this user, as far as it is one."""
    manifest.require_own(path)
    found = manifest.read(path)
    if "trouble" in found:
        return found
    if found["version"] not in (OF_DCP, VERSION):
        raise ConfigError(
            "the checkpoint was written by another version of dray",
            where=path / manifest.NAME,
            wanted=f"checkpoint version {VERSION}",
            found=f"checkpoint version {found['version']}, written by dray {found.get('dray')}",
            fix="resume with an image of that version; or begin with its model: model.name=RUN/checkpoints/final, and "
            "another checkpoint.folder",
        )
    match found:
        case {"step": step, "updates": updates, "world_size": world, "order": dict()} if (
            path.name == f"step-{step}"
            and natural(updates)
            and natural(world)
            and 0 < world <= len(found["files"])
            and all(files(rank)[1] in found["files"] for rank in range(world))
            and is_state(found.get("watch", {}))
        ):
            return found
    return {"trouble": "its manifest is not of this step, or not of a checkpoint"}


def wrong(path: Path, found: dict[str, Any], some: slice = slice(None)) -> list[str]:
    """What is wrong with some of the files; with the tensors each rank finds the same."""
    own = found["files"]
    troubles = list(shards.faults(found.get("tensors"), own)) if found["version"] == VERSION else []
    troubles = troubles or list(manifest.wrong(path, own, some).values())
    for name in [] if troubles else sorted(own)[some]:
        try:
            if name.endswith(".safetensors"):
                troubles += filter(None, [shards.misfit(path / name, found["tensors"])])
            elif name.startswith("rank-"):
                troubles += [] if _is_own(path / name) else [f"{name} is no position in the data"]
        except (SafetensorError, ValueError, RecursionError) as error:
            troubles.append(f"{name}: {error}")
    return troubles


def _is_own(path: Path) -> bool:
    match manifest.parse(path.read_bytes()):
        case {"feed": feed, "scaler": None | [int() | float(), int(), int()]}:
            return feed is None or (isinstance(feed, list) and all(map(_is_position, feed)))
    return False


def _is_position(shard: Any) -> bool:  # noqa: ANN401  any JSON value
    """Of a stream shard: its number, the part that it reads, documents taken of that, and tokens left over."""
    match shard:
        case [number, part, taken, [*left]]:
            return all(map(natural, (number, part, taken, *left)))
    return False


def opened(path: Path) -> Reader:
    """A checkpoint whose tensors are read without the run's ranks. One that is not whole is refused."""
    found = look(path)
    troubles = [found["trouble"]] if "trouble" in found else wrong(path, found)
    if not troubles and found["version"] == OF_DCP:
        troubles = ["it was written by an older dray; a run that resumes from it writes newer ones"]
    if troubles:
        raise DrayError(
            "the checkpoint is incomplete",
            wanted="the files of its manifest",
            found=f"{'; '.join(troubles[:3])} in {path}",
            fix="take another one: --step",
        )
    return Reader(path, found["tensors"])
