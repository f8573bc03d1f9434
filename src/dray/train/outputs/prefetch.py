"""Fetch what a recipe names on the hub."""

from __future__ import annotations

import os
import re

from dray.contract.findings import counted
from dray.contract.trainer.image_tasks import Prefetch
from dray.train.data import hub

_SPLITS = ("train", "validation", "test")


def run(job: Prefetch) -> None:
    """Each thing once, with its size."""
    names = [(f"data.{split}", job.data[split], split) for split in _SPLITS]
    names += [(f"data.mix.{name}.dataset", one["dataset"], "train") for name, one in job.data["mix"].items()]
    names += [(f"evaluate.{name}.dataset", one["dataset"], "test") for name, one in job.evaluate.items()]
    for key, name, split in names:
        if name.startswith("hub:"):
            print(f"{key} = {name}", flush=True)
            _report(tuple(file for _, files in hub.dataset(name, split) for file in files))
    model = job.model
    for key in ("name", "tokenizer"):
        if model[key] and not model[key].startswith(("/", ".")):
            print(f"model.{key} = {model[key]}", flush=True)
            own = key == "name" or model[key] == model["name"]
            revision, weights = model["revision" if own else "tokenizer_revision"], key == "name" and model["weights"]
            folder = hub.model(model[key], revision, weights=weights, code=model["trust_remote_code"])
            _report(tuple(entry.path for entry in os.scandir(folder)))


def _report(files: tuple[str, ...]) -> None:
    # Where the hub's library keeps a file: snapshots/COMMIT/..., and the commit is what pins it.
    commits = sorted({re.sub(r".*/snapshots/([0-9a-f]{40})/.*|.*", r"\1", file) for file in files} - {""})
    size = sum(os.stat(file).st_size for file in files)  # noqa: PTH116  strings, as the hub gives them
    print(f"  {counted(len(files), 'file')}, {size / 1e6:,.1f} MB{', commit '.join(['', *commits])}", flush=True)
