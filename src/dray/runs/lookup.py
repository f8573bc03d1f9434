"""What this machine's disk holds of what a recipe names, looked up once for the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dray.config.recipe import Recipe
from dray.contract.files import parse_json, read
from dray.contract.findings import ConfigError
from dray.facts import Facts, Files


def files(recipe: Recipe, facts: Facts) -> Files:
    """A job's planner runs in a container that sees HF_HOME alone: other paths are checked on the nodes."""
    if recipe.train is None:
        return Files()
    home = recipe.env.get("HF_HOME", facts.hf_home or "")
    return Files(
        configuration=_configuration(recipe, home),
        missing_on_hub=tuple(_missing_on_hub(recipe, home)),
        missing_paths=missing_paths(recipe) if facts.login else {},
    )


def _configuration(recipe: Recipe, home: str) -> dict[str, Any] | None:
    """The model's config.json, as transformers will read it."""
    model = recipe.model
    try:
        if not model.name:  # a tokenizer decides the vocabulary of a new model
            tokenizer = _json(model.tokenizer, "main", home) if model.tokenizer else {}
            vocabulary = tokenizer.get("vocab_size", 257)  # one for each byte
            return {"model_type": model.type, "vocab_size": vocabulary, **model.config}
        return {**_json(model.name, model.revision, home), **model.config}
    except (OSError, ConfigError, ValueError):  # the nodes say what is wrong with it
        return None


def _json(name: str, revision: str, home: str) -> dict[str, Any]:
    """The config.json of a folder, or of the hub's cache."""
    folder = Path(name)
    if not name.startswith(("/", ".")):
        cached = _cached(home, "models", name)
        ref = cached / "refs" / revision
        folder = cached / "snapshots" / (read(ref).decode().strip() if ref.is_file() else revision)
    found = parse_json(read(folder / "config.json").decode(), "the model", folder)
    if not isinstance(found, dict):
        raise ConfigError("the model's config.json is no table", where=folder)
    return found


def _cached(home: str, kind: str, name: str) -> Path:
    """Where the hub's cache keeps it; without HF_HOME the job has no cache, not even a home's."""
    return Path(home or "/nonexistent", "hub", f"{kind}--{name.replace('/', '--')}")


def _missing_on_hub(recipe: Recipe, home: str) -> list[str]:
    hub = [named.removeprefix("hub:").partition(":")[0] for named in recipe.datasets().values() if named[:4] == "hub:"]
    named = {
        "models": [name for name in (recipe.model.name, recipe.model.tokenizer) if name and name[0] not in "/."],
        "datasets": ["/".join(name.split("/")[:2]) for name in hub],
    }
    return [
        name for kind, names in named.items() for name in dict.fromkeys(names) if not _cached(home, kind, name).is_dir()
    ]


def missing_paths(recipe: Recipe) -> dict[str, str]:
    """The files and folders that the recipe's keys name, and that are not on this machine."""
    return {key: path for key, path in recipe.places().items() if not (Path(path).exists() or _fits(Path(path)))}


def _fits(pattern: Path) -> bool:
    return any(pattern.parent.glob(pattern.name))
