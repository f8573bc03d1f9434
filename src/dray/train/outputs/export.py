"""Weights as a folder that `from_pretrained` loads, file by file: of a checkpoint, or of a run at its end.

A checkpoint's are written on one CPU, whatever ranks wrote it. There is memory for one file of the result, and no more.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from dray.contract.image_tasks import Export
from dray.train.checkpoint.shards import TYPES, Reader, open_checkpoint, whole
from dray.train.config import of_plan
from dray.train.data import tokenizer
from dray.train.model import build, lora

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KINDS = ("weights", "others")
Tensors = dict[str, torch.Tensor]


def run(job: Export) -> None:
    """The folder is atomic."""
    target, config = Path(job.target), of_plan(job.plan)
    reader = open_checkpoint(Path(job.checkpoint))
    tokens = tokenizer.load(config)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = replace(config, model=replace(config.model, attn_implementation="auto"))
    names, kind = _names(reader), _TYPES[job.dtype]
    if config.lora:  # it is merged into the whole model, which is in memory then
        network: Any = build.build(config, tokens, filled=True)
        adapters = _read(reader, names)
        tensors = {name: weight.detach() for name, weight in network.named_parameters()} | adapters
        shell, weights = lora.plain(network), iter(lora.merged(network, tensors).items())
    else:
        shell = build.shell(config, tokens)
        weights = ((name, _read(reader, {name: names[name]})[name]) for name in names)
    write_weights(part, named_as_saved(shell, weights), kind, limit=int(job.shard_gb * 1e9))
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


def _read(reader: Reader, names: dict[str, tuple[str, dict[str, Any]]]) -> Tensors:
    found = {}
    for name, (kind, tensor) in names.items():
        found[name] = torch.empty(tensor["shape"], dtype=TYPES[tensor["dtype"]])
        reader.fill(whole(kind, {name: found[name]}))
    return found


def named_as_saved(network: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401  a transformers model
    """By the names that other programs read, a layer at a time: in memory transformers has a layer's experts as one."""
    for _, layer in itertools.groupby(weights, key=lambda pair: _layer(pair[0])):
        tensors = {name: weight.cpu() for name, weight in layer}
        yield from revert_weight_conversion(network, tensors).items()


def _layer(name: str) -> str:
    """All up to its number: `model.layers.0.` of `model.layers.0.mlp.up_proj.weight`; the same for what has none."""
    found = re.match(r"\D*\d+\.", name)
    return found[0] if found else ""


def write_weights(
    folder: Path, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype | None, *, limit: int
) -> None:
    """Write safetensors files of at most `limit` bytes, or of one tensor, and their index. None keeps each dtype."""
    files: list[list[str]] = []
    bucket: Tensors = {}
    total = size = 0

    def write() -> None:
        save_file(bucket, folder / _part(len(files)), metadata={"format": "pt"})
        files.append([*bucket])
        bucket.clear()

    for name, weight in weights:
        kind = dtype if dtype and weight.is_floating_point() else weight.dtype
        nbytes = weight.numel() * kind.itemsize
        if bucket and size + nbytes > limit:
            write()
            size = 0
        tensor = weight.detach().to(kind).cpu().contiguous()
        if tensor.untyped_storage().nbytes() > nbytes:  # a part of others' storage, which safetensors refuses
            tensor = tensor.clone()
        bucket[name] = tensor
        size += nbytes
        total += nbytes
    write()
    if len(files) == 1:
        (folder / _part(0)).rename(folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / _part(number)).rename(folder / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _part(number: int) -> str:
    """A file's name until it is known how many there are."""
    return f"model-{number + 1:05}.safetensors"


def swap(part: Path, final: Path) -> None:
    """Put the folder `part` in the place of `final`; killed at any moment, `recover` has one of them there again."""
    old = _old(final)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    part.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def recover(final: Path) -> None:
    """Undo a `swap` that was killed between its two renames."""
    if _old(final).exists() and not final.exists():
        _old(final).rename(final)


def _old(final: Path) -> Path:
    return final.with_name(f"{final.name}.old")
