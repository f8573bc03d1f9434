"""Checkpoints of before, which torch's DCP wrote: their index is a pickle, of which nothing is run here."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dray.contract.findings import ConfigError
from dray.train import manifest, shards
from dray.train.shards import Shard, Staging

_INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    (f"{_DCP}metadata", name)
    for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                 "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {(f"{_DCP}filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")} | {
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _Record:
    """What stands in the place of each of DCP's objects: it has attributes, and does nothing."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401  what the pickle says
        if isinstance(state, dict):
            self.__dict__.update(state)
        self.state = state


def _member(of: object, _: str) -> _Record:
    """A member of an enumeration, as some versions of Python have it in a pickle."""
    if of is not _Record:
        raise pickle.UnpicklingError(f"{_INDEX} names builtins.getattr, which no checkpoint needs")
    return _Record()


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  a class or a type of numbers
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{_INDEX} names {module}.{name}, which no checkpoint needs")


def convert(old: Path, new: Path, found: dict[str, Any]) -> None:
    """Write the same as one rank's checkpoint, whose manifest begins with `found`; a tensor at a time is in memory."""
    try:
        index = _Index(io.BytesIO((old / _INDEX).read_bytes())).load()
        tensors = dict(_converted(old, new, index, set(found["files"])))
        files = {
            f"rank-{rank}.json": manifest.written(new / f"rank-{rank}.json", (old / f"rank-{rank}.json").read_bytes())
            for rank in range(found["world_size"])
        }
    except Exception as error:  # whatever a crafted pickle makes of its reader
        raise ConfigError(
            "the checkpoint of an older dray cannot be read",
            where=old,
            wanted="what torch's distributed checkpoint wrote there",
            found=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            fix="take another one: remove this folder, or begin with another checkpoint.folder",
        ) from error
    files |= {file: tensors[file].pop("sum") for file in tensors}
    joined = shards.joined([tensors[file] for file in tensors], list(tensors))
    manifest.write(new, {**found, "files": files, "tensors": joined})


def _converted(old: Path, new: Path, index: Any, files: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:  # noqa: ANN401
    places = {(key.fqn, tuple(key.offset or ())): place for key, place in index.storage_data.items()}
    staging = Staging(torch.device("cpu"))
    for number, (name, saved) in enumerate(index.state_dict_metadata.items()):
        tensor = torch.empty(saved.size, dtype=saved.properties.state[0])
        for chunk in saved.chunks:
            place = places[name, tuple(chunk.offsets)]
            if place.relative_path not in files or getattr(place, "transform_descriptors", None):
                raise ValueError(f"{place.relative_path!r} is no file of this checkpoint as dray wrote it")
            with (old / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                part = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
            to = tensor
            for dim, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                to = to.narrow(dim, begin, length)
            to.copy_(part)
        staged = staging.fill({name: Shard(tuple(tensor.shape), 0, tensor)})
        file_name = f"converted-{number}.safetensors"
        written = manifest.written(new / file_name, staged.head, staged.numbers)
        yield file_name, {**staged.tensors, "sum": written}
