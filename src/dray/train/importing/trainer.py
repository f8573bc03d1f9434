"""Folders of transformers' Trainer and of `save_pretrained`, and files of tensors alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dray.train.importing.pickles import load
from dray.train.importing.source import WEIGHTS, Source, Tensors, checked, damaged, file, flat, json_of, natural

_STATE, _OPTIMIZER = "trainer_state.json", "optimizer.pt"


def read(folder: Path, found: set[str], *, trust: bool) -> Source:
    """A folder with whole weights in one file or in several."""
    name = next(one for one in WEIGHTS if {one, f"{one}.index.json"} & found)
    if name in found:
        weights = _tensors(file(folder, name), trust=trust)
    else:
        weights = _sharded(folder, f"{name}.index.json", trust=trust)
    step = None
    if _STATE in found:
        step = natural(json_of(folder, _STATE).get("global_step"), folder / _STATE, "global_step")
    if _OPTIMIZER not in found:
        return Source("weights alone", folder, weights, step)
    without = f"{_OPTIMIZER} numbers the weights and does not name them"
    return Source("transformers' Trainer", folder, weights, step, without=without)


def bare(path: Path, *, trust: bool) -> Source:
    """A file of tensors, which may lie within tables of a script's own."""
    return Source("weights alone", path.absolute().parent, _tensors(file(path.parent, path.name), trust=trust))


def _tensors(path: Path, *, trust: bool) -> Tensors:
    if path.suffix != ".safetensors":
        return checked(flat(load(path, trust=trust)), path)
    try:
        with safe_open(path, "pt") as opened:
            return checked({name: opened.get_tensor(name) for name in opened.keys()}, path)  # noqa: SIM118  no dict
    except SafetensorError as error:
        raise damaged(path, str(error)) from error


def _sharded(folder: Path, name: str, *, trust: bool) -> Tensors:
    places = json_of(folder, name).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise damaged(folder / name, "no weight_map from names to files")
    found: Tensors = {}
    for place in sorted({*places.values()}):
        if Path(place).name != place:
            raise damaged(folder / name, f"{place!a} is not a file of this folder")
        found |= _tensors(file(folder, place), trust=trust)
    if lost := [tensor for tensor in checked(dict.fromkeys(places, torch.empty(0)), folder) if tensor not in found]:
        raise damaged(folder / name, f"{lost[0]} is in none of its files")
    return found
