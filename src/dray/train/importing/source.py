"""A checkpoint as the importer sees it, and safe access to files that others wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dray.contract import files
from dray.contract.findings import ConfigError
from dray.train import errors

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
Tensors = dict[str, torch.Tensor]
_WRAPPERS = re.compile(r"^module\.|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_JSON = 64 << 20


class Adam(NamedTuple):
    """AdamW's state, by the names of the model's weights."""

    updates: int
    moments: dict[str, Tensors]
    """exp_avg and exp_avg_sq."""
    options: dict[str, Any]
    """As its first group of weights has them: betas, eps."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found. Its tensors are memory-mapped if their file allows it."""

    kind: str
    folder: Path
    """Where its configuration and its tokenizer may lie."""
    weights: Tensors
    step: int | None = None
    """How many optimizer steps were taken, where the source tells; else AdamW's count of updates does."""
    adam: Callable[[torch.nn.Module], Adam] | None = None
    """AdamW's state for this model."""
    without: str = field(default="no optimizer state")
    """Why there is no `adam`."""


def names(folder: Path) -> set[str]:
    """What is in a folder."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ConfigError(
            "the folder cannot be read", where=folder, found=error.strerror, fix="name another folder"
        ) from error


def file(folder: Path, name: str) -> Path:
    """A file of the folder. A link may lead to any other file of the user, and a FIFO waits for ever."""
    path = folder / name
    try:
        files.open_regular(path, link=False).close()
    except OSError as error:
        link = path.is_symlink()
        raise ConfigError(
            "a file of the checkpoint cannot be read",
            where=path,
            wanted="a file in this folder",
            found=f"a link to {path.readlink()}" if link else error.strerror,
            fix=f"if you know what it links to: cp -rL '{folder}' COPY, then import COPY"
            if link
            else "copy the checkpoint again",
        ) from error
    return path


def json_of(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder."""
    path = file(folder, name)
    found = files.parse_json(
        files.text(path, "a file of the checkpoint", limit=_JSON), "a file of the checkpoint", path
    )
    if not isinstance(found, dict):
        raise damaged(path, "no JSON object")
    return found


_DAMAGED = "the checkpoint is damaged, or of an unknown version"
_COPY = "copy it again, or import its weights from another file"


def damaged(where: Path, found: str) -> ConfigError:
    """The error of a file that is not as its program writes it."""
    return ConfigError(_DAMAGED, where=where, found=found[:300], fix=_COPY)


def reading(where: Path) -> AbstractContextManager[None]:
    """Whatever a crafted file makes of its reader is a damaged file."""
    return errors.refusing(_DAMAGED, where=where, fix=_COPY)


def natural(value: Any, where: Path, what: str) -> int:  # noqa: ANN401  what a file says
    """A non-negative integer; else the file is damaged."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise damaged(where, f"{what} is {ascii(value)[:80]}")
    return value


def checked(tensors: Mapping[Any, Any], where: Path) -> Tensors:
    """The tensors, by the names of the unwrapped model; refuse one larger than its file."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise damaged(where, f"{name} has fewer numbers than its shape {list(tensor.shape)} needs")
        if (plain := _WRAPPERS.sub("", name)) in found:
            raise damaged(where, f"two tensors are named {plain}")
        found[plain] = tensor.detach()
    return found


def flat(state: Any, before: str = "", depth: int = 8) -> dict[str, Any]:  # noqa: ANN401  what a file holds
    """Tables within tables, with dots between the names."""
    if not isinstance(state, Mapping) or not depth:
        return {}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.", depth - 1)
        else:
            found[f"{before}{name}"] = value
    return found


def matched(tensors: Tensors, wanted: Iterable[str], base: str, prefix: str | None) -> Tensors:
    """The model's tensors without what its writer put before their names, such as `app.model.`."""
    wanted = {*wanted}
    short = {name.removeprefix(f"{base}.") for name in wanted} if base else set()
    probes = [*sorted(wanted)[:8], *sorted(short)[:8]]
    found = {
        name[: -len(probe)]
        for name in tensors for probe in probes
        if name == probe or name.endswith(f".{probe}")
    } if prefix is None else {prefix}  # fmt: skip
    best: list[str] = []
    for some in (wanted, short):  # those of the model with its head, or of the model below it
        scores = {one: sum(one + name in tensors for name in some) for one in found}
        best = best or [one for one, score in scores.items() if score and score == max(scores.values())]
    if len(best) > 1:
        raise ConfigError(
            "the checkpoint has the model's tensors more than once",
            wanted="one copy of each tensor",
            found=", ".join(f"{one or 'no prefix'}" for one in sorted(best)[:8]),
            fix=f"--prefix {max(best)}",
        )
    chosen = best[0] if best else prefix or ""
    return {name.removeprefix(chosen): tensor for name, tensor in tensors.items() if name.startswith(chosen)}
