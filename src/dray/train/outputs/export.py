"""The weights of a checkpoint as a folder that `from_pretrained` loads.

On one CPU, whatever ranks wrote it, file by file: there is memory for one file of the result, and no more.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from dray.contract.jobs import Export
from dray.train import saved
from dray.train.config import of_plan
from dray.train.data import tokenizer
from dray.train.model import build, lora
from dray.train.shards import TYPES, Reader, whole

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KINDS = ("weights", "others")
Tensors = dict[str, torch.Tensor]


def run(job: Export) -> None:
    """The folder is atomic."""
    target, config = Path(job.target), of_plan(job.plan)
    reader = saved.opened(Path(job.checkpoint))
    tokens = tokenizer.load(config)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = replace(config, model=replace(config.model, attn_implementation="auto"))
    names, kind = _names(reader), _TYPES[job.dtype]
    if config.lora:  # it is merged into the whole model, which is in memory then
        network: Any = build.build(config, tokens, filled=True)
        whole = {name: weight.detach() for name, weight in network.named_parameters()} | _read(reader, names)
        shell, merged = lora.plain(network), lora.merged(network, whole)
        meta = {name: kept.to("meta") for name, kept in merged.items()}
        sizes = {name: kept.to(_type(kept.dtype, kind)) for name, kept in meta.items()}
    else:
        shell, merged = build.shell(config, tokens), {}
        with torch.device("meta"):
            sizes = _empty(names, kind)
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=int(job.shard_gb * 1e9))
    for file, some in split.filename_to_tensors.items():
        shard = {name: merged[name].to(sizes[name].dtype).contiguous() for name in some if name in merged}
        shard = shard or _read(reader, {name: names[name] for name in some}, kind)
        save_file(shard, part / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    shell.config.architectures, shell.config.dtype = [type(shell).__name__], _TYPES[job.dtype]
    shell.config.save_pretrained(part)
    if getattr(shell, "generation_config", None):
        shell.generation_config.save_pretrained(part)
    tokens.save_pretrained(part)
    part.rename(target)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print(f"{target}: {size / 1e6:,.1f} MB of {job.dtype} weights", flush=True)


def _names(reader: Reader) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is in the checkpoint by name, without the optimizer's: its kind, and its shape and type."""
    split = ((*key.partition("."), tensor) for key, tensor in reader.tensors.items())
    return {name: (kind, tensor) for kind, _, name, tensor in split if kind in _KINDS}


def _type(kept: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and kept.is_floating_point else kept


def _empty(names: dict[str, tuple[str, dict[str, Any]]], dtype: torch.dtype | None) -> Tensors:
    return {
        name: torch.empty(tensor["shape"], dtype=_type(TYPES[tensor["dtype"]], dtype))
        for name, (_, tensor) in names.items()
    }


def _read(reader: Reader, names: dict[str, tuple[str, dict[str, Any]]], dtype: torch.dtype | None = None) -> Tensors:
    found = _empty(names, dtype)
    for name, tensor in found.items():
        reader.fill(whole(names[name][0], {name: tensor}))
    return found
