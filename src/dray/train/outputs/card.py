"""The model card: what the model is, how it was trained, and its scores; written from the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dray.contract.dataset_name import HUB, parse
from dray.contract.findings import counted
from dray.train import objectives
from dray.train.config import Config

Figures = dict[str, dict[str, float]]


def write(folder: Path, config: Config, *, parameters: int, ranks: int, figures: Figures) -> None:
    """README.md, as the hub shows it."""
    text(config, parameters, ranks, figures).save(folder / "README.md")


def text(config: Config, parameters: int, ranks: int, figures: Figures) -> ModelCard:
    """The whole card: what the hub reads at its head, and a page."""
    named = config.model.name if not config.model.name.startswith(("/", ".")) else ""
    objective = objectives.named(config.train.objective)
    mix = {f"mix.{name}": one.dataset for name, one in config.data.mix.items()}
    names = mix or {"train": config.data.train}
    names |= {"validation": config.data.validation, "test": config.data.test}
    names |= {f"evaluate.{name}": one.dataset for name, one in config.evaluate.items()}
    found = [parse(name).files for name in names.values()]
    on_hub = [parse(name).files for name in names.values() if parse(name).builder == HUB]
    on_hub += [name.removeprefix("hf://datasets/") for name in found if name.startswith("hf://datasets/")]
    hub = sorted({"/".join(name.split("/")[:2]).partition("@")[0] for name in on_hub})
    task = "text-generation" if objective.predicts_next else "fill-mask"
    head = ModelCardData(
        base_model=named if config.model.weights and named else None,
        datasets=hub or None,
        eval_results=[*_results(task, names, figures)],
        library_name="transformers",
        model_name=config.name,
        pipeline_tag=task,
    )
    how = ", by LoRA" if config.lora else ", for analog hardware" if config.analog else ""
    pretrained = config.model.name and config.model.weights
    start = f"Trained from {named or config.model.name}" if pretrained else "Trained from scratch"
    page = "\n".join(
        (
            "---",
            head.to_yaml(),
            "---",
            "",
            f"# {config.name}",
            "",
            f"{parameters:,} parameters. {start} on {objective.learned}{how}: {counted(config.steps, 'step')} of "
            f"{config.global_size} samples of {config.data.sequence_length} tokens, on {counted(ranks, 'rank')}.",
            "",
            "| dataset | name |",
            "|---|---|",
            *(f"| {key} | `{_last(name)}` |" for key, name in names.items() if name),
            "",
            "| evaluation | loss | perplexity | accuracy |",
            "|---|---|---|---|",
            *(
                f"| {_label(event)} | {one['loss']:.4f} | {one['perplexity']:.3f} | {one['accuracy']:.4f} |"
                for event, one in figures.items()
            ),
            "",
            "## How to reproduce it",
            "",
            f"By dray {config.dray}, in run `{config.run}`, in the image "
            f"`{config.image_sha256 or 'without a digest: not in a SIF'}`, with this recipe:",
            "",
            "```toml",
            *_toml(config.recipe),
            "```",
            "",
        )
    )
    return ModelCard(page)


def _results(task: str, names: dict[str, str], figures: Figures) -> Iterator[EvalResult]:
    """Each figure, for the table that the hub shows beside the page."""
    for event, one in figures.items():
        label = _label(event)
        keys = (label, f"mix.{label}", f"evaluate.{label}", "train")
        dataset = _last(next((names[key] for key in keys if names.get(key)), label))
        for metric, value in one.items():
            if math.isfinite(value):
                yield EvalResult(task, dataset, dataset, metric, round(value, 4), metric_name=f"{label} {metric}")


def _label(event: str) -> str:
    return {"eval": "validation"}.get(event, event.removeprefix("eval-"))


def _last(name: str) -> str:
    """Without the folders of a path or a bucket, which are private."""
    named = parse(name)
    return (
        name if named.builder == HUB or named.files.startswith("hf://") else named.at(PurePosixPath(named.files).name)
    )


def _toml(recipe: dict[str, Any], before: str = "") -> Iterator[str]:
    """Whatever is set, a key a line."""
    for key, value in recipe.items():
        if isinstance(value, dict):
            yield from _toml(value, f"{before}{key}.")
        elif value is not None and value not in ("", []):
            place = isinstance(value, str) and (value.startswith("/") or parse(value).path[:1] == "/" or "://" in value)
            shown = value.partition("\n")[0] if key == "map" else value  # the file's text is its owner's
            yield f"{before}{key} = {json.dumps(_last(shown) if place else shown)}"
