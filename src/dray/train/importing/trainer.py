"""Folders of transformers' Trainer and of `save_pretrained`, and files of tensors alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import Trainer

from dray.train.importing.source import (
    WEIGHTS,
    Adam,
    Source,
    Tensors,
    checked,
    damaged,
    file,
    flat,
    json_of,
    natural,
)
from dray.train.pickles import load

_STATE, _OPTIMIZER = "trainer_state.json", "optimizer.pt"
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    path = file(folder, _OPTIMIZER)
    return Source("transformers' Trainer", folder, weights, step, partial(_adam, path, trust))


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


def _adam(path: Path, trust: bool, network: torch.nn.Module) -> Adam:
    state = load(path, trust=trust)
    match state:
        case {"state": dict(numbered), "param_groups": [*groups]} if groups and all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
        ):
            pass
        case _:
            raise damaged(path, "no state_dict of an optimizer")
    order = _order(network, numbered, groups, path)
    moments: dict[str, Tensors] = {}
    for kind in _MOMENTS:
        moments[kind] = checked({name: numbered[number].get(kind) for number, name in order.items()}, path)
    updates = {natural(numbered[number].get("step"), path, "step") for number in order}
    if len(updates) != 1:
        raise damaged(path, f"weights with different numbers of updates: {sorted(updates)[:4]}")
    return Adam(updates.pop(), moments, {key: groups[0].get(key) for key in ("betas", "eps")})


def _order(network: torch.nn.Module, state: dict[Any, Any], groups: list[Any], path: Path) -> dict[Any, str]:
    """Which weight each number is: the numbers of a group are its weights in the model's order.

    Versions of transformers differ in which weights have no decay. So each way is tried, and one that fits by every
    shape is taken; of two that fit in two ways neither is.
    """
    shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
    trainer: Any = Trainer
    decayed = [
        {*trainer.get_decay_parameter_names(None, network)},  # 4.46 and later
        {name for name, shape in shapes.items() if len(shape) > 1},  # DeepSpeed's and torch's examples
        {name for name in shapes if "bias" not in name and not _in_norm(network, name)},  # before
        {*shapes},
    ]
    fits: list[dict[Any, str]] = []
    numbers = [number for group in groups for number in group["params"]]
    if all("param_names" in group for group in groups):  # an optimizer that was given names
        decayed, named = [], [name for group in groups for name in group["param_names"]]
        fits = [dict(zip(numbers, named, strict=len(numbers) == len(named)))]
    for some in decayed:
        order = [name for name in shapes if name in some] + [name for name in shapes if name not in some]
        one = dict(zip(numbers, order, strict=False))
        if len(order) == len(numbers) and one not in fits:
            fits.append(one)

    def shaped(number: Any, name: str, kind: str) -> bool:  # noqa: ANN401
        tensor = state.get(number, {}).get(kind) if isinstance(state.get(number), dict) else None
        return isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shapes.get(name)

    fits = [one for one in fits if all(shaped(number, name, kind) for number, name in one.items() for kind in _MOMENTS)]
    if len(fits) == 1 and {*fits[0].values()} == {*shapes}:
        return fits[0]
    found = f"{len(numbers)} weights, and the model has {len(shapes)}" if len(numbers) != len(shapes) else ""
    raise damaged(path, found or f"{len(fits)} orders of weights fit its states, or exp_avg and exp_avg_sq are missing")


def _in_norm(network: torch.nn.Module, name: str) -> bool:
    module = network.get_submodule(name.rpartition(".")[0])
    return "norm" in type(module).__name__.lower()
