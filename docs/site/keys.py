"""The keys of each file of dray's, from the models that validate them."""

from __future__ import annotations

import json
from itertools import groupby

from pydantic import BaseModel
from text import code, entry, plain, slug

from dray.config.describe_keys import Schema
from dray.config.image_definition import Image
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.planning.plan import Plan
from dray.runs.capsule import Capsule
from dray.runs.result import Result

MODELS: dict[str, tuple[type[BaseModel], str, str]] = {
    "recipe": (Recipe, "Recipe", "One run of training: `recipes/*.toml`. See [Recipes](recipes.md)."),
    "site": (Site, "Site", "The profile of a cluster: `slurm/sites/*.toml`. See [Sites](../sites.md)."),
    "image": (Image, "Image", "What is in an image: `containers/*/image.toml`. See [Images](../images.md)."),
    "plan": (Plan, "Plan", "All that an attempt does: `plan.json`. `dray plan --json` prints it."),
    "capsule": (Capsule, "Capsule", "What repeats an attempt: `capsule.json`. See [Capsules](../compare.md#capsules)."),
    "result": (Result, "Result", "How an attempt ended: `result.json`. See [Metrics and results](metrics.md)."),
}  # fmt: skip


def pages() -> dict[str, str]:
    """One page for each file."""
    return {f"reference/{name}.md": page(*described) for name, described in MODELS.items()}


def page(model: type[BaseModel], title: str, about: str) -> str:
    """Every key: those of the file itself, then those of each table."""
    described = sorted(Schema(model).describe(), key=lambda key: _table(key[0]) != "")
    parts = [f"# {title}\n\n{about}\n"]
    tables: dict[str, list[tuple[str, str, str, str]]] = {}
    for table, found in groupby(described, key=lambda key: _table(key[0])):
        tables.setdefault(table, []).extend(found)
    for table, found in tables.items():
        if table:
            parts.append(f"## {table}\n")
        parts += [_key(*one) for one in found]
    return "\n".join(parts)


def _table(key: str) -> str:
    return key.split(".", maxsplit=1)[0].removesuffix("[]") if "." in key else ""


def _key(name: str, kind: str, default: str, about: str) -> str:
    shown = "" if not default else "required" if default == "required" else f"default {code(_short(default))}"
    facts = "; ".join(filter(None, [plain(kind), shown]))
    return entry(name, slug(name), "\n\n  ".join(filter(None, [f"*{facts}*" if facts else "", plain(about)])) or "data")


def _short(default: str) -> str:
    value = json.loads(default)
    return default if isinstance(value, (str, int, float, bool)) or len(default) < 80 else "a table of defaults"
