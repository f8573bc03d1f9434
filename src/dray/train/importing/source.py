"""A checkpoint as the importer sees it, and the kinds that are read: Trainer's, torch's DCP, DeepSpeed's, one file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from dray.contract.findings import ConfigError
from dray.train import errors
from dray.train.importing.pickles import INDEX, distributed, load

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_FSDP_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")  # of accelerate, inside Trainer's checkpoint
_WRAPPERS = re.compile(r"^module\.|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Adam(NamedTuple):
    """AdamW's state, by the names that the weights have in the source."""

    updates: int
    moments: dict[str, Tensors]
    """exp_avg and exp_avg_sq."""


class Source(NamedTuple):
    """A checkpoint of another program."""

    kind: str
    folder: Path
    """Where its configuration and its tokenizer may lie."""
    weights: Tensors
    step: int | None = None
    """The step, if the source names it; else the importer takes AdamW's count of updates."""
    adam: Callable[[], Adam] | None = None
    """Reads AdamW's state, if the source has it by the names of the weights."""


def reading(where: Path) -> AbstractContextManager[None]:
    """Refuse the checkpoint as damaged if reading it raises anything."""
    fix = "copy it again, or import its weights from another file"
    return errors.refusing("the checkpoint is damaged, or of an unknown version", where=where, fix=fix)


def unwrapped(tensors: Mapping[str, Any]) -> Tensors:
    """The tensors by the names of the model that DDP, FSDP or torch.compile had wrapped."""
    return {
        _WRAPPERS.sub("", name): tensor.detach() for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)
    }


def read_file(path: Path, *, trust: bool) -> Tensors:
    """The tensors of a .safetensors file, or of a file of torch.save, where they may lie in nested dicts."""
    if path.suffix == ".safetensors":
        return unwrapped(load_file(path))
    return unwrapped(_flat(load(path, trust=trust)))


def _flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def read_trainer(folder: Path, *, trust: bool) -> Source | None:
    """A folder of Trainer or of `save_pretrained`, or None. Trainer's optimizer.pt does not name its weights."""
    for name in _WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            parts = {name}
        elif index.exists():
            parts = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        else:
            continue
        weights: Tensors = {}
        for part in sorted(parts):
            if Path(part).name != part:
                raise ValueError(f"{index.name} names {part}, which is not a file of its folder")
            weights |= read_file(folder / part, trust=trust)
        state = folder / "trainer_state.json"
        if not state.exists():
            return Source("weights alone", folder, weights)
        return Source(
            "transformers' Trainer", folder, weights, json.loads(state.read_text(encoding="utf-8"))["global_step"]
        )
    return None


def read_distributed(folder: Path) -> Source | None:
    """A folder of torch's DCP, by a user's script or by Trainer with FSDP; or None."""
    folders = [part for part in (folder, *(folder / name for name in _FSDP_FOLDERS)) if (part / INDEX).exists()]
    if not folders:
        return None
    weights: Tensors = {}
    for part in folders:
        weights |= unwrapped(distributed(part))
    moments: dict[str, Tensors] = {kind: {} for kind in (*MOMENTS, "step")}
    for name in [*weights]:
        weight, _, kind = name.rpartition(".")
        if kind in moments:
            moments[kind][weight] = weights.pop(name)
    return Source("torch's DCP", folders[0], weights, None, partial(_adam, moments) if moments["exp_avg"] else None)


def _adam(moments: dict[str, Tensors]) -> Adam:
    """What `get_state_dict` names optimizer.state.NAME.exp_avg, .exp_avg_sq and .step."""
    return Adam(same_count(moments["step"].values()), {kind: moments[kind] for kind in MOMENTS})


def same_count(counts: Iterable[Any]) -> int:
    """How many updates AdamW has made, which is the same for all weights."""
    distinct = {int(count) for count in counts}
    if not distinct:
        raise ValueError("the source has no count of AdamW's updates")
    if len(distinct) != 1:
        raise ValueError(f"AdamW has made different numbers of updates: {sorted(distinct)[:4]}")
    return distinct.pop()


def without_prefix(tensors: Tensors, names: Iterable[str], base: str, prefix: str | None) -> Tensors:
    """Return the model's tensors without their common prefix, such as `app.model.`; None: the most frequent one.

    `names` are those of the model; a checkpoint of its base model has them without `base`, such as `transformer.`
    """
    if prefix is None:
        known = {*names}
        known |= {name.removeprefix(f"{base}.") for name in known}
        prefixes = Counter(_prefix(name, known) for name in tensors)
        del prefixes[None]
        ranked = prefixes.most_common(2)
        if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
            raise ConfigError(
                "the checkpoint has the model's tensors more than once",
                wanted="one copy of each tensor",
                found=", ".join(sorted(str(found) or "no prefix" for found, _ in ranked)),
                fix=f"--prefix {ranked[0][0] or ranked[1][0]}; of two optimizers import the weights alone: --to FOLDER",
            )
        prefix = ranked[0][0] if ranked else ""
    prefix = prefix or ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _prefix(name: str, known: set[str]) -> str | None:
    """What comes before the longest ending of the name that the model knows; None if it knows none."""
    begin = 0
    while name[begin:] not in known:
        begin = name.find(".", begin) + 1
        if not begin:
            return None
    return name[:begin]
