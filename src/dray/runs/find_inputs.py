"""The models, datasets and programs of a recipe that exist on this machine, looked up once for the plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dray.config.recipe import Command, Recipe
from dray.contract import exit_codes
from dray.contract.files import parse_json, read
from dray.contract.findings import ConfigError, Finding
from dray.contract.trainer.dataset import HUB, parse
from dray.facts import Facts, Files


def files(recipe: Recipe, facts: Facts) -> Files:
    """What the plan needs to know of files. A job's planner sees only HF_HOME: the nodes check other paths."""
    if recipe.command:
        in_job = facts.scheduler == "slurm" and not facts.login
        return Files(findings=() if in_job else tuple(_program(recipe.command)))
    cache = Path(recipe.env.get("HF_HOME", facts.hf_home) or "/nonexistent", "hub")
    return Files(
        configuration=_configuration(recipe, cache),
        missing_on_hub=tuple(_missing_on_hub(recipe, cache)),
        missing_paths=missing_paths(recipe) if facts.login else {},
    )


def missing_paths(recipe: Recipe) -> dict[str, str]:
    """The files and folders that the recipe names and this machine does not have, by key."""
    missing = {}
    for key, name in recipe.places().items():
        path = Path(name)
        if not path.exists() and not any(path.parent.glob(path.name)):  # it may be a pattern
            missing[key] = name
    return missing


def _configuration(recipe: Recipe, cache: Path) -> dict[str, Any] | None:
    """The model's config.json, as transformers will read it."""
    model = recipe.model
    try:
        if model.name:
            return {**_read(model.name, model.revision, cache), **model.config}
        tokenizer = _read(model.tokenizer, model.tokenizer_revision, cache) if model.tokenizer else {}
    except (OSError, ValueError, ConfigError):  # the nodes report what is wrong
        return None
    vocabulary = tokenizer.get("vocab_size", 257)  # without a tokenizer, one for each byte
    return {"model_type": model.type, "vocab_size": vocabulary, **model.config}


def _read(name: str, revision: str, cache: Path) -> dict[str, Any]:
    """The config.json of a folder or of the hub's cache."""
    folder = Path(name)
    if not name.startswith(("/", ".")):
        cached = _cached(cache, "models", name)
        ref = cached / "refs" / revision
        folder = cached / "snapshots" / (read(ref).decode().strip() if ref.is_file() else revision)
    found = parse_json(read(folder / "config.json").decode(), "the model", folder)
    return found if isinstance(found, dict) else {}


def _cached(cache: Path, kind: str, name: str) -> Path:
    return cache / f"{kind}--{name.replace('/', '--')}"


def _missing_on_hub(recipe: Recipe, cache: Path) -> Iterator[str]:
    models = [name for name in (recipe.model.name, recipe.model.tokenizer) if name and name[0] not in "/."]
    named = [("models", name) for name in models]
    for name in recipe.datasets().values():
        dataset = parse(name)
        if dataset.builder == HUB:  # OWNER/NAME[@REVISION][/SUBSET]
            named.append(("datasets", "/".join(dataset.files.partition("@")[0].split("/")[:2])))
    for kind, name in dict.fromkeys(named):
        if not _cached(cache, kind, name).is_dir():
            yield name


def _program(command: Command) -> Iterator[Finding]:
    """Why the command's own script cannot be started; a program of PATH or of the image is not looked for."""
    word, path = command.argv[0], Path(command.folder, command.argv[0])
    is_script = word.endswith(".py")
    in_image = word.startswith("/") and not path.is_relative_to(command.folder)
    if in_image or ("/" not in word and not is_script):
        return
    if not path.is_file():
        found, fix = f"{path} is not a file", "correct the path; it starts in the current or in the recipe's folder"
    elif not is_script and not os.access(path, os.X_OK):
        found, fix = f"{path} may not be executed", shlex.join(["chmod", "+x", str(path)])
    else:
        return
    yield Finding("the command cannot be started", found=found, fix=fix, code=exit_codes.CONFIG)
