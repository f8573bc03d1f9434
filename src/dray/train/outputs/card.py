"""The model card, README.md: what the model is, how it was trained, and its scores."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from dray.contract.findings import counted
from dray.contract.trainer.dataset import HUB, parse
from dray.train import objectives
from dray.train.config import Config

_FOLDERS = re.compile(r'(?:(?!hf:)\b\w+:/|(?<![^":])(?<!hf:))/(?:[^/"]*/)*')  # of paths and buckets, which are private


def write(folder: Path, config: Config, *, parameters: int, ranks: int, figures: dict[str, dict[str, float]]) -> None:
    """Write the card; `figures` are the loss, perplexity and accuracy of each evaluation."""
    model, data = config.model, config.data
    objective = objectives.named(config.train.objective)
    names = [data.train, data.validation, data.test]
    names += [source.dataset for source in data.mix.values()]
    names += [evaluation.dataset for evaluation in config.evaluate.values()]
    on_hub = [name.files.partition("@")[0].split("/")[:2] for name in map(parse, names) if name.builder == HUB]
    public = bool(model.name) and not model.name.startswith(("/", "."))
    pretrained = model.name and model.weights
    head = ModelCardData(
        base_model=model.name if pretrained and public else None,
        datasets=sorted({"/".join(parts) for parts in on_hub}) or None,
        library_name="transformers",
        model_name=config.name,
        pipeline_tag="text-generation" if objective.predicts_next else "fill-mask",
    )
    start = (
        f"Trained from {Path(model.name).name if not public else model.name}" if pretrained else "Trained from scratch"
    )
    how = ", by LoRA" if config.lora else ", for analog hardware" if config.analog else ""
    scores = "\n".join(
        f"| {event.removeprefix('eval-')} | {score['loss']:.4f} | {score['perplexity']:.3f} | {score['accuracy']:.4f} |"
        for event, score in figures.items()
    )
    recipe = "\n".join(_lines(config.recipe))
    page = f"""---
{head.to_yaml()}
---

# {config.name}

{parameters:,} parameters. {start} on {objective.learned}{how}: {counted(config.steps, "step")} of \
{config.global_size} samples of {data.sequence_length} tokens, on {counted(ranks, "rank")}.

| evaluation | loss | perplexity | accuracy |
|---|---|---|---|
{scores}

## How to reproduce it

By dray {config.dray}, in run `{config.run}`, in the image \
`{config.image_sha256 or "without a digest: not in a SIF"}`, with this recipe:

```toml
{recipe}
```
"""
    ModelCard(page).save(folder / "README.md")


def _lines(recipe: dict[str, Any], section: str = "") -> Iterator[str]:
    """All that is set, a key a line."""
    for key, value in recipe.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{section}{key}.")
        elif value is not None and value not in ("", []):
            shown = value.partition("\n")[0] if key == "map" else value  # the text of the function's file is private
            yield f"{section}{key} = {_FOLDERS.sub('', json.dumps(shown))}"
