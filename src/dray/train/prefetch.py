"""`python -m dray.train.prefetch JSON`: bring here what a recipe's [data] and [model] name on the hub."""

from __future__ import annotations

import json
import os
import sys

from huggingface_hub.utils.tqdm import disable_progress_bars

from dray.train import hub

_SPLITS = {"train": "train", "validation": "validation", "test": "test"}


def main(said: str) -> None:
    """Each thing once, with its size."""
    disable_progress_bars()  # a log is no terminal
    recipe = json.loads(said)
    data, model = recipe["data"], recipe["model"]
    texts = [(f"data.{key}", data[key], split) for key, split in _SPLITS.items()]
    texts += [(f"evaluate.{name}.dataset", one["dataset"], "test") for name, one in recipe["evaluate"].items()]
    for key, text, split in texts:
        if text.startswith("hub:"):
            print(f"{key} = {text}", flush=True)
            _told(hub.dataset(text, split))
    for key in ("name", "tokenizer"):
        if model[key] and not model[key].startswith(("/", ".")):
            print(f"model.{key} = {model[key]}", flush=True)
            revision, weights = (model["revision"], model["weights"]) if key == "name" else ("main", False)
            folder = hub.model(model[key], revision, weights=weights, code=model["trust_remote_code"])
            _told(tuple(entry.path for entry in os.scandir(folder)))


def _told(files: tuple[str, ...]) -> None:
    size = sum(os.stat(file).st_size for file in files)  # noqa: PTH116  strings, as the hub gives them
    print(f"  {len(files)} files, {size / 1e6:,.1f} MB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
