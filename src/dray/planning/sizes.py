"""How large a recipe's model is, as far as this machine can know, and whether it fits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.planning import memory
from dray.planning.plan import Plan


def words(plan: Plan, site: Site, gigabytes: float | None) -> str:
    """What the run will hold in memory, for a reader. A run that cannot fit is refused."""
    recipe = plan.recipe
    if recipe.train is None:
        return ""
    said = _configuration(recipe)
    shape = memory.shape(said) if said else None
    if shape is None:
        model = recipe.model.name or (recipe.model.type if said else recipe.model.tokenizer)
        lost = "has no config.json here" if model.startswith(("/", ".")) else "is not here yet; dray prefetch brings it"
        unchecked = " (so --gpu-memory was not held against it)" if gigabytes else ""
        why = f"no such kind is known: {model}" if said else f"{model} {lost}"
        return f"memory: not estimated, {why}{unchecked}\n"
    world = plan.world
    known = site.gpu_memory_gb if gigabytes is None else gigabytes
    memory.refuse(
        recipe,
        shape,
        ranks=world.size,
        ranks_per_node=world.ranks_per_node,
        gigabytes=known,
        why=f"site {site.name}" if gigabytes is None else "--gpu-memory",
    )
    found = memory.estimate(recipe, shape, ranks=world.size, ranks_per_node=world.ranks_per_node)
    of = f" of {known:g}" if known and found.gpu else ""
    head = f"memory: an estimate for {shape.parameters:,} parameters{of and f', on GPUs{of} GB'}"
    return "\n".join([head, *(f"  {line}" for line in found.lines())]) + "\n"


def _configuration(recipe: Recipe) -> dict[str, Any] | None:
    """As transformers will have it."""
    model = recipe.model
    try:
        if not model.name:  # a tokenizer decides how many words a new model has
            words = json.loads(_file(model.tokenizer, "main").read_text(encoding="utf-8")) if model.tokenizer else {}
            vocabulary = words.get("vocab_size", 257)  # one for each byte
            return {"model_type": model.type, "vocab_size": vocabulary, **model.config}
        return {**json.loads(_file(model.name, model.revision).read_text(encoding="utf-8")), **model.config}
    except (OSError, ValueError):
        return None


def _file(name: str, revision: str) -> Path:
    """A folder's own, or that which the hub's cache has."""
    if name.startswith(("/", ".")):
        return Path(name, "config.json")
    home = Path(os.environ.get("HF_HOME") or "/nonexistent")  # nor has the job what is in a home's cache
    held = home / "hub" / f"models--{name.replace('/', '--')}"
    named = held / "refs" / revision
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    return held / "snapshots" / commit / "config.json"
