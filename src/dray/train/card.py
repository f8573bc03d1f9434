"""The card of a model: what it is, from what it was made and how, and what it scores; written from the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dray.train.config import Config

Figures = dict[str, dict[str, float]]


def write(folder: Path, config: Config, *, parameters: int, ranks: int, figures: Figures) -> None:
    """README.md, as the hub shows it."""
    (folder / "README.md").write_text(text(config, parameters, ranks, figures), encoding="utf-8")


def text(config: Config, parameters: int, ranks: int, figures: Figures) -> str:
    """The whole card."""
    named = config.model.name if not config.model.name.startswith(("/", ".")) else ""
    texts = {"train": config.data.train, "validation": config.data.validation, "test": config.data.test}
    texts |= {f"evaluate.{name}": one.dataset for name, one in config.evaluate.items()}
    hub = sorted({"/".join(said.removeprefix("hub:").partition(":")[0].split("/")[:2]) for said in texts.values()
                  if said.startswith("hub:")})  # fmt: skip
    head: dict[str, Any] = {"library_name": "transformers"}
    if config.objective != "masked":
        head["pipeline_tag"] = "text-generation"
    if named and config.model.weights:
        head["base_model"] = named
    if hub:
        head["datasets"] = hub
    kind = {"causal": "text as it comes", "masked": "hidden tokens", "sft": "the answers of conversations"}
    how = ", by LoRA" if config.lora else ", for analog hardware" if config.analog else ""
    begun = (
        f"It goes on from {named or config.model.name}" if config.model.name and config.model.weights else "It was new"
    )
    return "\n".join(
        (
            "---",
            *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
            "---",
            "",
            f"# {config.name}",
            "",
            f"{parameters:,} parameters. {begun} and learnt {kind[config.objective]}{how}: {config.steps} steps of "
            f"{config.global_size} samples of {config.data.sequence_length} tokens, on {ranks} ranks.",
            "",
            "| dataset | what it was |",
            "|---|---|",
            *(f"| {name} | `{_last(said)}` |" for name, said in texts.items() if said),
            "",
            "| figures | loss | perplexity | accuracy |",
            "|---|---|---|---|",
            *(
                f"| {_called(event)} | {one['loss']:.4f} | {one['perplexity']:.3f} | {one['accuracy']:.4f} |"
                for event, one in figures.items()
            ),
            "",
            "## Made again",
            "",
            f"By dray {config.about['dray']}, in run `{config.about['run']}`, in the image "
            f"`{config.about['image_sha256'] or 'of no digest: not in a SIF'}`, with this recipe:",
            "",
            "```toml",
            *_toml(config.recipe),
            "```",
            "",
        )
    )


def _called(event: str) -> str:
    return {"eval": "validation"}.get(event, event.removeprefix("eval-"))


def _last(said: str) -> str:
    """A path says where somebody keeps his things, which is nobody's business."""
    return said if said == "builtin" or said.startswith("hub:") else Path(said).name


def _toml(recipe: dict[str, Any], before: str = "") -> Iterator[str]:
    """Whatever is set, a key a line."""
    for key, value in recipe.items():
        if isinstance(value, dict):
            yield from _toml(value, f"{before}{key}.")
        elif value is not None and value not in ("", []):
            place = isinstance(value, str) and value.startswith("/")
            yield f"{before}{key} = {json.dumps(_last(value) if place else value)}"
