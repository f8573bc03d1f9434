"""Folders of DeepSpeed's ZeRO, of any stage and any number of ranks: `global_stepN`, and what Trainer has around it.

DeepSpeed's own converters (zero_to_fp32, its universal checkpoints) unpickle whatever the files hold, and the first has
no averages. Here no global of a file is run, and DeepSpeed need not be installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dray.contract import files
from dray.contract.findings import ConfigError, counted
from dray.train.importing.pickles import load
from dray.train.importing.source import Adam, Source, Tensors, checked, damaged, file, names, natural

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d\d)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d\d)_model_states\.pt")
_TAG = re.compile(r"\w[\w.-]*")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FP32 = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
Shapes = dict[str, tuple[int, ...]]


def folder(path: Path, found: set[str]) -> Path | None:
    """The folder with the ranks' files: this one, or the one that `latest` names; None if there is none."""
    if any(map(_MODEL.fullmatch, found)):
        return path
    if "latest" not in found:
        return None
    try:
        tag = files.read(file(path, "latest"), limit=1024).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path / "latest", str(error)) from error
    if not _TAG.fullmatch(tag) or not (path / tag).is_dir() or (path / tag).is_symlink():
        raise damaged(path / "latest", f"{ascii(tag)[:80]}, which is not a folder beside it")
    return path / tag


def read(path: Path, *, trust: bool) -> Source:
    """Read the optimizer's fp32 weights and AdamW's averages."""
    found = names(path)
    models, optimizers = _ranks(path, found, _MODEL, trust), _ranks(path, found, _OPTIMIZER, trust)
    if not models:
        raise damaged(path, "no mp_rank_00_model_states.pt")
    head = models[0]
    where = path.parent if head and (path.parent / "latest").exists() else path
    step = natural(head.get("global_steps"), path, "global_steps")
    groups = _shapes(head.get("param_shapes"), path) if optimizers else []
    whole = checked(head.get("module") or {}, path)
    if not optimizers:
        return Source("DeepSpeed", where, whole, step, without="its ranks' *_optim_states.pt are missing")
    states = [_state(one.get("optimizer_state_dict"), path) for one in optimizers]
    stage = _stage(states[0], path)
    count = natural(len(states), path, "ranks")
    if count != _partitions(states[0]):
        raise damaged(path, f"the files of {count} of {_partitions(states[0])} ranks")
    joined = partial(_joined, groups, stage, path)
    flats = [[_flat(one, path) for one in state.get(_FP32[stage]) or []] for state in states]
    weights = joined(flats)
    buffers = {name: whole[name] for name in head.get("buffer_names") or [] if name in whole}
    frozen = _frozen(models, stage, path)
    shared = {name: weights[of] for name, of in dict(head.get("shared_params") or {}).items() if of in weights}
    return Source(
        f"DeepSpeed's ZeRO, stage {'1 or 2' if stage < 3 else '3'}, of {counted(count, 'rank')}",
        where,
        checked({**weights, **frozen, **buffers, **shared}, path),
        step,
        partial(_adam, states, stage, joined, path),
    )


def _ranks(path: Path, found: set[str], kind: re.Pattern[str], trust: bool) -> list[dict[str, Any]]:
    """What each rank's file holds, in their order."""
    named = {int(match[1] or 0): name for name in found if (match := kind.fullmatch(name))}
    parallel = [name for name in found if (match := kind.fullmatch(name)) and match[2] != "00"]
    if parallel or any(name.startswith(("layer_", "expert_")) for name in found):
        raise ConfigError(
            "the checkpoint's model was split by pipeline, tensor or expert parallelism",
            where=path,
            wanted="data parallelism only (mp_rank_00)",
            found=(parallel or sorted(name for name in found if name.startswith(("layer_", "expert_"))))[0],
            fix="save its weights as one file with the program that trained it, and import that file",
        )
    if sorted(named) != [*range(len(named))]:
        raise damaged(path, f"files of ranks {sorted(named)[:8]} only")
    read = [load(file(path, named[rank]), trust=trust) for rank in sorted(named)]
    if not all(isinstance(one, dict) for one in read):
        raise damaged(path, "a rank's file that holds no dict")
    return read


def _state(state: Any, path: Path) -> dict[str, Any]:  # noqa: ANN401  what the file says
    if not isinstance(state, dict):
        raise damaged(path, "no optimizer_state_dict")
    return state


def _stage(state: dict[str, Any], path: Path) -> int:
    """By what it holds: the number itself is an enumeration of DeepSpeed's."""
    found = next((stage for stage, key in _FP32.items() if key in state), 0)
    if not found:
        raise damaged(path, "no fp32 weights in the optimizer's state")
    return 2 if found < 3 else 3


def _partitions(state: dict[str, Any]) -> Any:  # noqa: ANN401
    count = state.get("partition_count")
    return max(count) if isinstance(count, list | tuple) and count else count


def _shapes(groups: Any, path: Path) -> list[Shapes]:  # noqa: ANN401
    match groups:
        case [*some] if some and all(
            isinstance(group, dict)
            and all(isinstance(name, str) and isinstance(shape, torch.Size) for name, shape in group.items())
            for group in some
        ):
            return [{name: tuple(shape) for name, shape in group.items()} for group in some]
    raise damaged(path, "no param_shapes with names and shapes")


def _flat(tensor: Any, path: Path) -> torch.Tensor:  # noqa: ANN401
    if not isinstance(tensor, torch.Tensor):
        raise damaged(path, "a partition that is not a tensor")
    return checked({"a partition": tensor}, path)["a partition"].flatten()


def _joined(groups: list[Shapes], stage: int, path: Path, ranks: list[list[torch.Tensor]]) -> Tensors:
    """Whole tensors of the ranks' flat ones: to stage 2 a group's ranks follow one another, in 3 each tensor's do."""
    if stage < 3:
        if any(len(rank) != len(groups) for rank in ranks):
            raise damaged(path, f"{len(ranks[0])} groups of weights, but {len(groups)} in param_shapes")
        found: Tensors = {}
        for number, shapes in enumerate(groups):
            found |= dict(_cut(torch.cat([rank[number] for rank in ranks]), shapes, path))
        return found
    shapes = {name: shape for group in groups for name, shape in group.items()}
    lengths = {name: -(-math.prod(shape) // len(ranks)) for name, shape in shapes.items()}
    parts = [dict(_cut(torch.cat(rank), {name: (size,) for name, size in lengths.items()}, path)) for rank in ranks]
    return {
        name: torch.cat([part[name] for part in parts])[: math.prod(shape)].view(shape)
        for name, shape in shapes.items()
    }


def _cut(row: torch.Tensor, shapes: Shapes, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of these shapes, one after the other; what is left over aligns it."""
    begin = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if begin + size > row.numel():
            raise damaged(path, f"the partitions end before the end of {name}")
        yield name, row[begin : begin + size].view(shape)
        begin += size


def _frozen(models: list[dict[str, Any]], stage: int, path: Path) -> Tensors:
    """Weights that no optimizer moves."""
    shapes = models[0].get("frozen_param_shapes") or {}
    found: Tensors = {}
    for name, shape in shapes.items():
        parts = [_flat((one.get("frozen_param_fragments") or {}).get(name), path) for one in models]
        row = torch.cat(parts if stage == 3 else parts[:1])
        found |= dict(_cut(row, {name: tuple(shape)}, path))
    return found


def _adam(states: list[dict[str, Any]], stage: int, joined: Any, path: Path, _: torch.nn.Module) -> Adam:  # noqa: ANN401
    own: list[Any] = [one.get("base_optimizer_state" if stage < 3 else "optimizer_state_dict") for one in states]
    match own[0]:
        case {"state": dict(numbered), "param_groups": [dict(group), *_]} if all(
            isinstance(one, dict) and isinstance(one.get("state"), dict) for one in own
        ):
            order = sorted(numbered)
        case _:
            raise damaged(path, "no AdamW state by group (elastic checkpoints have none)")
    moments = {}
    for kind in _MOMENTS:
        moments[kind] = joined([[_flat(one["state"].get(key, {}).get(kind), path) for key in order] for one in own])
    updates = {natural(one["state"][key].get("step"), path, "step") for one in own for key in order}
    if len(updates) != 1:
        raise damaged(path, f"groups with different numbers of updates: {sorted(updates)[:4]}")
    return Adam(updates.pop(), moments, {key: group.get(key) for key in ("betas", "eps")})
