"""`python -m dray.train.export CHECKPOINT TO GB DTYPE PLAN`: the weights of a checkpoint, as anybody loads them.

On one CPU, whatever ranks wrote it, file by file: there is memory for one file of the result, and no more.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers.utils import logging

from dray.train import checkpoint, lora, model, words
from dray.train.config import Config, read
from dray.train.stop import EXIT_FAILED, stop

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KINDS = ("weights", "others")
Tensors = dict[str, torch.Tensor]


def main(path: Path, target: Path, gigabytes: float, dtype: str, config: Config) -> None:
    """The folder is whole or not there."""
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is wanted
    troubles = checkpoint.troubles(path)
    if troubles:
        stop(
            "the checkpoint is not whole",
            wanted="what its manifest says",
            found=f"{'; '.join(troubles[:3])} in {path}",
            fix="take another one: --step",
            code=EXIT_FAILED,
        )
    tokenizer = words.tokenizer(config)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = replace(config, model=replace(config.model, attn_implementation="auto"))
    names, kind = _names(path), _TYPES[dtype]
    if config.lora:  # it is beside the model that it was made for, which is whole in memory then
        network: Any = model.build(config, tokenizer, filled=True)
        whole = {name: weight.detach() for name, weight in network.named_parameters()} | _read(path, names)
        shell, merged = lora.plain(network), lora.merged(network, whole)
        meta = {name: kept.to("meta") for name, kept in merged.items()}
        sizes = {name: kept.to(_type(kept.dtype, kind)) for name, kept in meta.items()}
    else:
        shell, merged = model.shell(config, tokenizer), {}
        with torch.device("meta"):
            sizes = _empty(names, kind)
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=int(gigabytes * 1e9))
    for file, some in split.filename_to_tensors.items():
        shard = {name: merged[name].to(sizes[name].dtype).contiguous() for name in some if name in merged}
        shard = shard or _read(path, {name: names[name] for name in some}, kind)
        save_file(shard, part / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    shell.config.architectures, shell.config.dtype = [type(shell).__name__], _TYPES[dtype]
    shell.config.save_pretrained(part)
    if getattr(shell, "generation_config", None):
        shell.generation_config.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(target)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print(f"{target}: {size / 1e6:,.1f} MB of {dtype} weights", flush=True)


def _names(path: Path) -> dict[str, tuple[str, Any]]:
    """What is in the checkpoint by name, without the optimizer's: its kind, and its size and type."""
    held = FileSystemReader(path).read_metadata().state_dict_metadata
    parted = ((*key.partition("."), said) for key, said in held.items())
    return {name: (kind, said) for kind, _, name, said in parted if kind in _KINDS}


def _type(kept: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted and kept.is_floating_point else kept


def _empty(names: dict[str, tuple[str, Any]], wanted: torch.dtype | None) -> Tensors:
    return {
        name: torch.empty(said.size, dtype=_type(said.properties.dtype, wanted)) for name, (_, said) in names.items()
    }


def _read(path: Path, names: dict[str, tuple[str, Any]], wanted: torch.dtype | None = None) -> Tensors:
    found = _empty(names, wanted)
    kinds = {kind for kind, _ in names.values()}
    state = {kind: {name: found[name] for name in names if names[name][0] == kind} for kind in kinds}
    load(state, checkpoint_id=path, no_dist=True)
    return found


if __name__ == "__main__":
    source, to, gigabytes, dtype, plan = sys.argv[1:]
    main(Path(source), Path(to), float(gigabytes), dtype, read(plan))
