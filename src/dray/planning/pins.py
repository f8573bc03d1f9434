"""What of the hub's a recipe pins to a commit, and what another download may have changed."""

from __future__ import annotations

import re

from dray.config.recipe import Recipe
from dray.contract import dataset

_COMMIT = re.compile("[0-9a-f]{40}")


def on_hub(recipe: Recipe) -> dict[str, str]:
    """The keys that name something of the hub, and its revision; a dataset's is in its name."""
    if recipe.train is None:
        return {}
    datasets = {key: name.partition(":")[2] for key, name in recipe.datasets().items() if name.startswith("hub:")}
    files = {key: dataset.parse(name).files for key, name in recipe.datasets().items()}
    streamed = {key: name.split("/")[4:5] for key, name in files.items() if name.startswith("hf://datasets/")}
    found = {key: (name or [""])[0].partition("@")[2] for key, name in streamed.items()}
    found |= {key: name.partition(":")[0].partition("@")[2].partition("/")[0] for key, name in datasets.items()}
    model = recipe.model
    if model.name and model.name[0] not in "/.":
        found["model.revision"] = model.revision
    if model.tokenizer and model.tokenizer != model.name and model.tokenizer[0] not in "/.":
        found["model.tokenizer_revision"] = model.tokenizer_revision
    return found


def reason(recipe: Recipe) -> str:
    """Whether the same recipe reads the same bytes another time."""
    loose = [key for key, revision in on_hub(recipe).items() if not _COMMIT.fullmatch(revision)]
    if not loose:
        return "all of it is pinned to commits"
    return f"not pinned to a commit: {', '.join(loose)}; `dray prefetch` prints the commits"
