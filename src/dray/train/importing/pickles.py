"""The one place that reads pickles: torch's files and the index of torch's DCP. Without --trust they run no code."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.serialization import safe_globals

from dray.contract.findings import ConfigError

INDEX = ".metadata"
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}  # fmt: skip
_REFUSED_GLOBAL = re.compile(r"\bGLOBAL (\w+(?:\.\w+)+)")  # how torch names what it does not load


class _Inert:
    """Stands for DeepSpeed's own objects, such as the loss scaler: their code is not run."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _member(owner: object, name: str) -> _Inert:
    """Stand for a member of one of DeepSpeed's enumerations, which Python 3.11.0 to 3.11.3 pickles by getattr."""
    if isinstance(owner, type) and issubclass(owner, _Inert):
        return owner()
    raise pickle.UnpicklingError(f"names GLOBAL builtins.getattr, of {name}")


def load(path: Path, *, trust: bool = False) -> Any:  # noqa: ANN401  what the file holds
    """What torch.save wrote; its tensors are memory-mapped, except in files of torch before 1.6."""
    inert: dict[str, Any] = {"builtins.getattr": _member}
    while True:
        try:
            with safe_globals([(placeholder, name) for name, placeholder in inert.items()]):
                return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=not trust)
        except ImportError as error:  # with --trust
            raise ConfigError(
                "the file needs a Python package that is missing",
                where=path,
                found=error,
                fix="install it beside dray, or import with --engine and an image that has it",
            ) from error
        except pickle.UnpicklingError as error:
            match = _REFUSED_GLOBAL.search(str(error))
            if not match:
                raise
            name = match[1]
            if name.startswith("deepspeed.") and name not in inert:
                inert[name] = type(name, (_Inert,), {})
                continue
            raise ConfigError(
                "the file is a pickle that would run code",
                where=path,
                wanted="only tensors, numbers, strings, lists and dicts",
                found=f"the global {name[:200]}",
                fix="--trust, if you know who wrote it: its code then runs with your rights",
            ) from error


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if name == "PosixPath" and module in ("pathlib", "pathlib._local"):
            return PosixPath
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enumerations so
            return lambda _enumeration, member: _MEM_FORMAT_ENCODING[member]
        raise pickle.UnpicklingError(f"{INDEX} names {module}.{name}, which no checkpoint needs")


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401
        with (Path(self.path) / INDEX).open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        return metadata


def distributed(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder that torch's DCP wrote, without its pickled values."""
    reader = _Reader(folder)
    tensors = {
        name: torch.empty(saved.size, dtype=saved.properties.dtype)
        for name, saved in reader.read_metadata().state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):  # DCP warns that this is one process
        try:
            load_distributed(tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # a BaseException
            raise ValueError(str(error.failures[0][0])) from error
    return tensors
