"""The one place that reads pickles: torch's files and DCP's index. Nothing in them is run, unless the user says so."""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from dray.contract import files
from dray.contract.findings import ConfigError
from dray.train.errors import described

INDEX = ".metadata"
_LARGEST = 1 << 30  # bytes of an index; 100,000 shards are some 30 MB
_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    (f"{_DCP}metadata", name)
    for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                 "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {(f"{_DCP}filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")} | {
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip
_REFUSED = re.compile(r"\bGLOBAL (\w+(?:\.\w+)+)")  # how torch names what it does not load
_INERT = "deepspeed."  # its loss scaler, its enumerations and its addresses, which stand beside the tensors
_GETATTR = "builtins.getattr"


class _Record:
    """What stands in the place of an object: it has attributes, and does nothing."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401  what the pickle says
        if isinstance(state, dict):
            self.__dict__.update(state)
        self.state = state


def load(path: Path, *, trust: bool = False) -> Any:  # noqa: ANN401  what the file holds
    """What torch.save wrote. Its tensors are mapped and not read; a file of an old torch is read whole."""
    inert: dict[str, Any] = {_GETATTR: _member}
    while True:
        try:
            with safe_globals([(record, name) for name, record in inert.items()]):
                return _load(path, weights_only=True)
        except pickle.UnpicklingError as error:
            named = _REFUSED.search(str(error))
            name = named[1] if named else ""
            if name.startswith(_INERT) and name not in inert:
                inert[name] = type(name, (_Record,), {})  # torch finds each by its name, so each is one of its own
                continue
            if trust:
                return _trusted(path)
            if name:
                _refuse(path, name, error)
            raise _damaged(path, error) from error
        except Exception as error:  # whatever a damaged file makes of its reader
            raise _damaged(path, error) from error


def _load(path: Path, *, weights_only: bool) -> Any:  # noqa: ANN401
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError as error:
        if "_use_new_zipfile_serialization" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=weights_only)


def _trusted(path: Path) -> Any:  # noqa: ANN401
    try:
        return _load(path, weights_only=False)
    except ImportError as error:
        raise ConfigError(
            "the file needs a package that is not installed here",
            where=path,
            found=str(error),
            fix="--engine docker, if the image has the package",
        ) from error
    except Exception as error:
        raise _damaged(path, error) from error


def _refuse(path: Path, name: str, error: Exception) -> None:
    raise ConfigError(
        "the file is a pickle that would run code",
        where=path,
        wanted="only tensors, numbers, strings, lists and dicts",
        found=f"the global {name[:200]}",
        fix="--trust, if you know who wrote it: its code then runs with your rights",
    ) from error


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "the file cannot be read",
        where=path,
        wanted="a file of torch.save",
        found=ascii(described(error, 300))[1:-1][:300],
        fix="copy it again: it is damaged, or of another kind",
    )


def _member(of: object, _: str) -> _Record:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 have it in a pickle."""
    if not (isinstance(of, type) and issubclass(of, _Record)):
        raise pickle.UnpicklingError(f"names GLOBAL {_GETATTR} of what is no record")
    return of()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  a class or a type of numbers
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if f"{module}.{name}" == _GETATTR:
            return _member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs")


class Distributed:
    """Tensors by name, one at a time, of a folder that torch's DCP wrote. `names` are its files."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        self._folder, self._names = folder, names
        try:
            index = _Unpickler(io.BytesIO(files.read(folder / INDEX, limit=_LARGEST))).load()
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{INDEX} {error}") from error
        self._places = {
            (key.fqn, tuple(getattr(key, "offset", None) or ())): place for key, place in index.storage_data.items()
        }
        self._tensors = {name: one for name, one in index.state_dict_metadata.items() if hasattr(one, "chunks")}
        self._room = sum((folder / name).stat().st_size for name in names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """The whole of it."""
        saved = self._tensors[name]
        shape, dtype = tuple(saved.size), saved.properties.state[0]
        parts = [math.prod(chunk.sizes) for chunk in saved.chunks]
        if sum(parts) != math.prod(shape) or math.prod(shape) * dtype.itemsize > self._room:
            raise ValueError(f"{name} has the shape {list(shape)}, but its parts have {sum(parts)} numbers")
        tensor = torch.zeros(shape, dtype=dtype)
        for chunk in saved.chunks:
            part, to = self._part(self._places[name, tuple(chunk.offsets)]), tensor
            for dim, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                to = to.narrow(dim, begin, length)
            if part.shape != to.shape:
                raise ValueError(f"{name} has a part of the shape {list(part.shape)}, not {list(to.shape)}")
            to.copy_(part)
        return tensor

    def _part(self, place: Any) -> torch.Tensor:  # noqa: ANN401  a record
        if place.relative_path not in self._names or getattr(place, "transform_descriptors", None):
            raise ValueError(f"{place.relative_path!r} is not a plain file of this checkpoint")
        with files.open_regular(self._folder / place.relative_path, link=False) as file:
            if not 0 <= place.offset <= place.offset + place.length <= self._room:
                raise ValueError(f"{place.relative_path!r} is shorter than {place.offset} + {place.length} bytes")
            file.seek(place.offset)
            read = io.BytesIO(file.read(place.length))
        part: torch.Tensor = torch.load(read, map_location="cpu", weights_only=True)
        return part
