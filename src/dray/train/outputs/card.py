"""The card of a model: what it is, from what it was made and how, and what it scores; written from the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from dray.contract.dataset import HUB, parse
from dray.contract.findings import counted
from dray.train import objectives
from dray.train.config import Config

Figures = dict[str, dict[str, float]]


def write(folder: Path, config: Config, *, parameters: int, ranks: int, figures: Figures) -> None:
    """README.md, as the hub shows it."""
    (folder / "README.md").write_text(text(config, parameters, ranks, figures), encoding="utf-8")


def text(config: Config, parameters: int, ranks: int, figures: Figures) -> str:
    """The whole card."""
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
    head: dict[str, Any] = {"library_name": "transformers"}
    if objective.predicts_next:
        head["pipeline_tag"] = "text-generation"
    if named and config.model.weights:
        head["base_model"] = named
    if hub:
        head["datasets"] = hub
    how = ", by LoRA" if config.lora else ", for analog hardware" if config.analog else ""
    pretrained = config.model.name and config.model.weights
    start = f"Trained from {named or config.model.name}" if pretrained else "Trained from scratch"
    return "\n".join(
        (
            "---",
            *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
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
