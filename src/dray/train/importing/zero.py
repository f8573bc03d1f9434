"""Folders of DeepSpeed's ZeRO, of any stage and any number of ranks: `global_stepN`, or the folder around it.

DeepSpeed's converters (zero_to_fp32, universal checkpoints) unpickle whatever the files hold. Here none of their code
runs, and DeepSpeed need not be installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dray.contract.findings import ConfigError, counted
from dray.train.importing.pickles import load
from dray.train.importing.source import MOMENTS, Adam, Source, Tensors, same_count, unwrapped

_FP32 = "single_partition_of_fp32_groups"  # of stages 1 and 2
_FP32_OF_STAGE_3 = "fp32_flat_groups"
Shapes = Mapping[str, tuple[int, ...]]
Flats = list[list[torch.Tensor]]
"""The flat tensors of each rank."""


def read(folder: Path, *, trust: bool) -> Source | None:
    """The 32-bit weights of the optimizer, and AdamW's averages; None if the folder is not DeepSpeed's."""
    latest = folder / "latest"
    if latest.is_file():
        folder /= latest.read_text(encoding="utf-8").strip()
    models = _ranks(folder, "model", trust)
    if not models:
        return None
    _require_whole_models(folder)
    rank_0, optimizers = models[0], _ranks(folder, "optim", trust)
    config_folder = folder.parent if (folder.parent / "latest").is_file() else folder
    module = {name: tensor for name, tensor in unwrapped(rank_0["module"] or {}).items() if tensor.numel()}
    if not optimizers:
        return Source("DeepSpeed", config_folder, module, rank_0["global_steps"])
    states = [rank["optimizer_state_dict"] for rank in optimizers]
    stage_3 = _FP32_OF_STAGE_3 in states[0]
    join_ranks = partial(_join_stage_3 if stage_3 else _join, rank_0["param_shapes"])
    ranks = states[0]["partition_count"]
    ranks = ranks if isinstance(ranks, int) else max(ranks)
    if len(states) != ranks:
        raise ValueError(f"the files of {len(states)} of {ranks} ranks")
    weights = join_ranks([state[_FP32_OF_STAGE_3 if stage_3 else _FP32] for state in states])
    # Tied weights come from the 32-bit ones: `module` has them in 16 bits.
    shared = {
        name: weights[original]
        for name, original in dict(rank_0.get("shared_params") or {}).items()
        if original in weights
    }
    return Source(
        f"DeepSpeed's ZeRO, stage {'3' if stage_3 else '1 or 2'}, of {counted(ranks, 'rank')}",
        config_folder,
        unwrapped(module | weights | shared),
        rank_0["global_steps"],
        partial(_adam, states, "optimizer_state_dict" if stage_3 else "base_optimizer_state", join_ranks),
    )


def _ranks(folder: Path, kind: str, trust: bool) -> list[dict[str, Any]]:
    """What the file of each rank holds, in their order."""
    files = sorted(folder.glob(f"*mp_rank_00_{kind}*_states.pt"), key=lambda path: (len(path.name), path.name))
    return [load(path, trust=trust) for path in files]


def _require_whole_models(folder: Path) -> None:
    parts = [path.name for path in folder.iterdir() if path.name.startswith(("layer_", "expert_", "mp_rank_01_"))]
    if parts or any(folder.glob("*_mp_rank_01_*")):
        raise ConfigError(
            "the checkpoint's model was split by pipeline, tensor or expert parallelism",
            where=folder,
            wanted="data parallelism only (mp_rank_00)",
            found=min(parts, default="files of mp_rank_01"),
            fix="save its weights as one file with the program that trained it, and import that file",
        )


def _join(groups: list[Shapes], ranks: Flats) -> Tensors:
    """Whole tensors in stages 1 and 2: the ranks' parts of a group of weights follow one another."""
    whole: Tensors = {}
    for number, shapes in enumerate(groups):
        whole |= _cut(torch.cat([rank[number] for rank in ranks]), shapes)
    return whole


def _join_stage_3(groups: list[Shapes], ranks: Flats) -> Tensors:
    """Whole tensors in stage 3: each rank has an equal part of each tensor, and the last part is padded."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    lengths = {name: (-(-math.prod(shape) // len(ranks)),) for name, shape in shapes.items()}
    parts = [_cut(torch.cat(rank), lengths) for rank in ranks]
    return {
        name: torch.cat([part[name] for part in parts])[: math.prod(shape)].view(shape)
        for name, shape in shapes.items()
    }


def _cut(row: torch.Tensor, shapes: Shapes) -> Tensors:
    """Tensors of these shapes, one after the other; the numbers after them are padding."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = torch.split(row[: sum(sizes)], sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _adam(states: list[dict[str, Any]], key: str, join_ranks: Callable[[Flats], Tensors]) -> Adam:
    groups = [[group for _, group in sorted(state[key]["state"].items())] for state in states]
    moments = {}
    for kind in MOMENTS:
        moments[kind] = unwrapped(join_ranks([[group[kind].flatten() for group in rank] for rank in groups]))
    return Adam(same_count(group["step"] for rank in groups for group in rank), moments)
