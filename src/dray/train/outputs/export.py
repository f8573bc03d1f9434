"""A checkpoint's weights as a folder that `from_pretrained` loads, or all of it as torch's DCP.

The weights are written on one CPU, whatever ranks wrote the checkpoint, and one file of them is in memory at a time.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers.core_model_loading import revert_weight_conversion

from dray.contract.trainer.image_tasks import Export
from dray.train.checkpoint import manifest
from dray.train.checkpoint.shards import TYPES, Reader, open_checkpoint, whole_shards
from dray.train.config import Config, of_plan
from dray.train.data import tokenizer
from dray.train.model import build, lora

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tensors = dict[str, torch.Tensor]


def run(job: Export) -> None:
    """Write a new folder, which gets its name when it is complete."""
    target, config, checkpoint = Path(job.target), of_plan(job.plan), Path(job.checkpoint)
    reader = open_checkpoint(checkpoint)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if job.format == "dcp":
        _write_dcp(part, reader, manifest.read_checkpoint(checkpoint)["updates"])
        description = "weights and optimizer state, as torch's DCP"
    else:
        _write_model(part, reader, config, job)
        description = f"{job.dtype} weights"
    part.rename(target)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {size / 1e6:,.1f} MB of {description}", flush=True)


def _write_model(folder: Path, reader: Reader, config: Config, job: Export) -> None:
    tokens = tokenizer.load(config)
    config = replace(config, model=replace(config.model, attn_implementation="auto"))
    weights = _weights(reader, averaged=True)
    if config.lora:  # merged into the whole model, which is in memory then
        network: Any = build.build(config, tokens, with_weights=True)
        tensors = {name: weight.detach() for name, weight in network.named_parameters()} | dict(weights)
        shell, weights = lora.plain(network), iter(lora.merged(network, tensors).items())
    else:
        shell = build.shell(config, tokens)
    dtype = _TYPES[job.dtype]
    write_weights(folder, named_as_saved(shell, weights), dtype, limit=int(job.shard_gb * 1e9))
    shell.config.architectures, shell.config.dtype = [type(shell).__name__], dtype
    shell.config.save_pretrained(folder)
    if getattr(shell, "generation_config", None):
        shell.generation_config.save_pretrained(folder)
    tokens.save_pretrained(folder)


def _weights(reader: Reader, *, averaged: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, or their averages if `averaged` and the run kept them, and the buffers, by name."""
    for key in sorted(reader.tensors):
        kind, _, name = key.partition(".")
        if kind in ("weights", "others"):
            average = f"ema.{name}"
            yield name, _read(reader, average if averaged and average in reader.tensors else key)


def _read(reader: Reader, key: str) -> torch.Tensor:
    saved_as, (kind, _, name) = reader.tensors[key], key.partition(".")
    tensor = torch.empty(saved_as["shape"], dtype=TYPES[saved_as["dtype"]])
    reader.fill(whole_shards(kind, {name: tensor}))
    return tensor


def _write_dcp(folder: Path, reader: Reader, updates: int) -> None:
    """Write all tensors by the names that torch's `get_state_dict` has for them. All are in memory at once."""
    state = {f"model.{name}": tensor for name, tensor in _weights(reader)}
    for key in reader.tensors:
        kind, _, name = key.partition(".")
        if kind not in ("weights", "others", "feed"):
            state[f"optimizer.state.{name}.{kind}"] = _read(reader, key)
            state[f"optimizer.state.{name}.step"] = torch.tensor(float(updates))
    with warnings.catch_warnings(action="ignore"):  # DCP warns that this is one process
        save_distributed(state, checkpoint_id=folder, no_dist=True)


def named_as_saved(network: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401  a transformers model
    """Yield the weights under their names in saved files, a layer at a time: in memory its experts are one tensor."""
    for _, layer in itertools.groupby(weights, key=lambda pair: _layer(pair[0])):
        tensors = {name: weight.cpu() for name, weight in layer}
        yield from revert_weight_conversion(network, tensors).items()


def _layer(name: str) -> str:
    """The part of a name up to its first number, such as `model.layers.0.`; empty if it has none."""
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
        save_file(bucket, folder / _file_name(len(files)), metadata={"format": "pt"})
        files.append([*bucket])
        bucket.clear()

    for name, weight in weights:
        target_dtype = dtype if dtype and weight.is_floating_point() else weight.dtype
        nbytes = weight.numel() * target_dtype.itemsize
        if bucket and size + nbytes > limit:
            write()
            size = 0
        tensor = weight.detach().to(target_dtype).cpu().contiguous()
        if tensor.untyped_storage().nbytes() > nbytes:  # a part of others' storage, which safetensors refuses
            tensor = tensor.clone()
        bucket[name] = tensor
        size += nbytes
        total += nbytes
    write()
    if len(files) == 1:
        (folder / _file_name(0)).rename(folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / _file_name(number)).rename(folder / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _file_name(number: int) -> str:
    """A file's name until it is known how many there are."""
    return f"model-{number + 1:05}.safetensors"


def swap(part: Path, final: Path) -> None:
    """Put the folder `part` in the place of `final`. If the process is killed, `recover` brings one of them back."""
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
