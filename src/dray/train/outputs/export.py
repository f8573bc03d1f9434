"""The weights of a checkpoint as a folder that `from_pretrained` loads.

On one CPU, whatever ranks wrote it, file by file: there is memory for one file of the result, and no more.
"""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from dray.contract.findings import DrayError
from dray.contract.jobs import Export
from dray.train import checkpoint
from dray.train.config import of_plan
from dray.train.data import tokenizer
from dray.train.model import build, lora

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KINDS = ("weights", "others")
Tensors = dict[str, torch.Tensor]


def run(job: Export) -> None:
    """The folder is atomic."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is enough
    path, target, config = Path(job.checkpoint), Path(job.target), of_plan(job.plan)
    troubles = checkpoint.troubles(path)
    if troubles:
        raise DrayError(
            "the checkpoint is incomplete",
            wanted="the files of its manifest",
            found=f"{'; '.join(troubles[:3])} in {path}",
            fix="take another one: --step",
        )
    tokens = tokenizer.load(config)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = replace(config, model=replace(config.model, attn_implementation="auto"))
    names, kind = _names(path), _TYPES[job.dtype]
    if config.lora:  # it is merged into the whole model, which is in memory then
        network: Any = build.build(config, tokens, filled=True)
        whole = {name: weight.detach() for name, weight in network.named_parameters()} | _read(path, names)
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
        shard = shard or _read(path, {name: names[name] for name in some}, kind)
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


def _names(path: Path) -> dict[str, tuple[str, Any]]:
    """What is in the checkpoint by name, without the optimizer's: its kind, and its size and type."""
    held = FileSystemReader(path).read_metadata().state_dict_metadata
    split = ((*key.partition("."), tensor) for key, tensor in held.items())
    return {name: (kind, tensor) for kind, _, name, tensor in split if kind in _KINDS}


def _type(kept: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and kept.is_floating_point else kept


def _empty(names: dict[str, tuple[str, Any]], dtype: torch.dtype | None) -> Tensors:
    return {
        name: torch.empty(tensor.size, dtype=_type(tensor.properties.dtype, dtype))
        for name, (_, tensor) in names.items()
    }


def _read(path: Path, names: dict[str, tuple[str, Any]], dtype: torch.dtype | None = None) -> Tensors:
    found = _empty(names, dtype)
    kinds = {kind for kind, _ in names.values()}
    state = {kind: {name: found[name] for name in names if names[name][0] == kind} for kind in kinds}
    load(state, checkpoint_id=path, no_dist=True)
    return found
