"""Which models and datasets of the hub a recipe pins to a commit, so that another download cannot change them."""

from __future__ import annotations

import re

from dray.config.recipe import Recipe
from dray.contract import dataset

_COMMIT = re.compile("[0-9a-f]{40}")


def on_hub(recipe: Recipe) -> dict[str, str]:
    """The recipe's keys that name models and datasets of the hub, each with its revision."""
    if recipe.train is None:
        return {}
    datasets = {key: name.partition(":")[2] for key, name in recipe.datasets().items() if name.startswith("hub:")}
    files = {key: dataset.parse(name).files for key, name in recipe.datasets().items()}
    streamed = {key: name.split("/")[4:5] for key, name in files.items() if name.startswith("hf://datasets/")}
    revisions = {key: (name or [""])[0].partition("@")[2] for key, name in streamed.items()}
    revisions |= {key: name.partition(":")[0].partition("@")[2].partition("/")[0] for key, name in datasets.items()}
    model = recipe.model
    if model.name and model.name[0] not in "/.":
        revisions["model.revision"] = model.revision
    if model.tokenizer and model.tokenizer != model.name and model.tokenizer[0] not in "/.":
        revisions["model.tokenizer_revision"] = model.tokenizer_revision
    return revisions


def reason(recipe: Recipe) -> str:
    """Whether the recipe reads the same bytes the next time, as text; empty if it reads nothing of the hub."""
    revisions = on_hub(recipe)
    loose = [key for key, revision in revisions.items() if not _COMMIT.fullmatch(revision)]
    if loose:
        return f"not pinned to a commit: {', '.join(loose)}; `dray prefetch` prints the commits"
    return "all models and datasets are pinned to commits" if revisions else ""
