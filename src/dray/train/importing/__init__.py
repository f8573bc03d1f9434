"""Checkpoints that others wrote: what kind one is, and its tensors by name. A file of this folder for each kind."""

from __future__ import annotations

from pathlib import Path

from dray.contract.findings import ConfigError
from dray.train.importing import distributed, trainer, zero
from dray.train.importing.source import WEIGHTS, Source, names

_KINDS = "a folder of transformers' Trainer (checkpoint-N), of DeepSpeed (global_stepN) or of torch's DCP (.metadata), "
_KINDS += "or a .safetensors, .bin, .pt or .pth file"


def find(path: Path, *, trust: bool) -> Source:
    """Detect the kind of checkpoint by its file names, and read it."""
    if path.is_file():
        return trainer.bare(path, trust=trust)
    found = names(path)
    if "manifest.json" in found and any(name.startswith("rank-") for name in found):
        fix = "set checkpoint.folder to it in the recipe, or: dray model export RUN"
        _refuse(path, "a checkpoint of dray's own", fix)
    if folder := zero.folder(path, found):
        return zero.read(folder, trust=trust)
    if parts := distributed.folders(path, found):
        return distributed.read(parts)
    if found & {*WEIGHTS, *(f"{name}.index.json" for name in WEIGHTS)}:
        return trainer.read(path, found, trust=trust)
    if "adapter_config.json" in found:
        _refuse(path, "a LoRA adapter alone", "merge it with peft: model.merge_and_unload().save_pretrained(FOLDER)")
    steps = {name for name in found if name.partition("-")[0] == "checkpoint" and name.partition("-")[2].isdigit()}
    if steps:
        newest = max(steps, key=lambda name: int(name.partition("-")[2]))
        _refuse(path, ", ".join(sorted(steps)[:8]), f"name one of them: {path / newest}")
    return _refuse(path, ", ".join(sorted(found)[:8]) or "an empty folder", "name another folder")


def _refuse(path: Path, found: str, fix: str) -> Source:
    raise ConfigError("there is no checkpoint that can be imported", where=path, wanted=_KINDS, found=found, fix=fix)
