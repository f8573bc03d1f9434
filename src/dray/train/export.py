"""`python -m dray.train.export CHECKPOINT TO GB DTYPE PLAN`: the weights of a checkpoint, as anybody loads them.

On one CPU, whatever ranks wrote it: tensor by tensor, so that there is memory for one file of the result and no more.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers.utils import logging

from dray.train import checkpoint, lora, model, words
from dray.train.config import Config, read
from dray.train.stop import EXIT_FAILED, stop

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KINDS = ("weights", "others")
Shard = dict[str, torch.Tensor]


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
    config = replace(config, model=replace(config.model, attention="auto"))
    names = _names(path)
    if config.lora:  # it is beside the model that it was made for, which is whole in memory then
        network: Any = model.build(config, tokenizer, filled=True)
        whole = {name: weight.detach() for name, weight in network.named_parameters()} | _read(path, names)
        shell, tensors = lora.plain(network), iter(lora.merged(network, whole).items())
    else:
        shell = model.shell(config, tokenizer)
        tensors = (pair for key, said in names.items() for pair in _read(path, {key: said}).items())
    _write(part, _shards(tensors, int(gigabytes * 1e9), _TYPES[dtype]))
    shell.config.architectures, shell.config.dtype = [type(shell).__name__], _TYPES[dtype]
    shell.config.save_pretrained(part)
    if getattr(shell, "generation_config", None):
        shell.generation_config.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(target)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print(f"{target}: {size / 1e6:,.1f} MB of {dtype} weights", flush=True)


def _names(path: Path) -> dict[str, Any]:
    """What is in the checkpoint, without the optimizer's: sizes by kind and name."""
    held = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: said for key, said in held.items() if key.partition(".")[0] in _KINDS}


def _read(path: Path, names: dict[str, Any]) -> Shard:
    state: dict[str, Shard] = {kind: {} for kind in _KINDS}
    for key, said in names.items():
        kind, _, name = key.partition(".")
        state[kind][name] = torch.empty(said.size, dtype=said.properties.dtype)
    load({kind: named for kind, named in state.items() if named}, checkpoint_id=path, no_dist=True)
    return {name: tensor for named in state.values() for name, tensor in named.items()}


def _shards(tensors: Iterator[tuple[str, torch.Tensor]], most: int, dtype: torch.dtype) -> Iterator[Shard]:
    """As many tensors together as fit."""
    some: Shard = {}
    for name, kept in tensors:
        tensor = kept.to(dtype) if kept.is_floating_point() else kept
        if some and _bytes(some) + _bytes({name: tensor}) > most:
            yield some
            some = {}
        some[name] = tensor.contiguous()
    yield some


def _bytes(some: Shard) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in some.values())


def _write(part: Path, shards: Iterator[Shard]) -> None:
    places: dict[str, int] = {}
    size = 0
    for number, shard in enumerate(shards, 1):
        save_file(shard, part / f"{number}", metadata={"format": "pt"})
        places |= dict.fromkeys(shard, number)
        size += _bytes(shard)
    count = max(places.values())
    if count == 1:
        (part / "1").rename(part / "model.safetensors")
        return
    names = {number: f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)}
    for number, name in names.items():
        (part / f"{number}").rename(part / name)
    index = {"metadata": {"total_size": size}, "weight_map": {name: names[place] for name, place in places.items()}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


if __name__ == "__main__":
    source, to, gigabytes, dtype, plan = sys.argv[1:]
    main(Path(source), Path(to), float(gigabytes), dtype, read(plan))
