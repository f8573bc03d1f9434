"""The models, datasets and programs of a recipe that exist on this machine, looked up once for the plan."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dray import engines, process
from dray.config import dray_home
from dray.config.recipe import Command, Recipe
from dray.contract import exit_codes
from dray.contract.files import parse_json, read
from dray.contract.findings import ConfigError, DrayError, Finding, nearest
from dray.facts import Counted, Facts, Files
from dray.planning.estimates import memory, model_shape

_TYPES = Path(__file__).with_name("model_types.toml")


def files(recipe: Recipe, facts: Facts, *, exact: bool = False) -> Files:
    """What the plan needs to know of files. A job's planner sees only HF_HOME: the nodes check other paths.

    In an image, or with `exact`, the model's saved activations are counted, but not for a compiled model.
    """
    if recipe.command:
        return Files(findings=tuple(_program(recipe.command, facts)))
    if recipe.train is None:
        return Files()
    home = recipe.env.get("HF_HOME", facts.hf_home or "")
    configuration = _configuration(recipe, home)
    _require_sizes(recipe, configuration or {})
    in_image = Path(sys.prefix, "image.json").is_file() and recipe.image != "cpu"
    compiles = recipe.train.compile is True or (recipe.train.compile == "auto" and recipe.image != "cpu")
    ask = configuration and (exact or in_image) and not compiles
    found = list(_model_type(recipe, facts, configuration))
    if exact and compiles:
        problem = "--exact cannot count a compiled model, so the memory is an estimate"
        found.append(
            Finding(
                problem,
                found=f"train.compile = {str(recipe.train.compile).lower()}",
                fix="--exact train.compile=false",
                kind="note",
            )
        )
    return Files(
        configuration=configuration,
        counted=_counted(recipe, configuration, exact=exact) if configuration and ask else None,
        findings=tuple(found),
        missing_on_hub=tuple(_missing_on_hub(recipe, home)),
        missing_paths=missing_paths(recipe) if facts.login else {},
    )


def _configuration(recipe: Recipe, home: str) -> dict[str, Any] | None:
    """The model's config.json, as transformers will read it."""
    model = recipe.model
    try:
        if not model.name:  # a tokenizer decides the vocabulary of a new model
            tokenizer = _json(model.tokenizer, model.tokenizer_revision, home) if model.tokenizer else {}
            vocabulary = tokenizer.get("vocab_size", 257)  # one for each byte
            return {"model_type": model.type, "vocab_size": vocabulary, **model.config}
        return {**_json(model.name, model.revision, home), **model.config}
    except (OSError, ConfigError, ValueError):  # the nodes report what is wrong
        return None


def _require_sizes(recipe: Recipe, configuration: dict[str, Any]) -> None:
    """Refuse a configuration whose sizes are no numbers."""
    model = recipe.model
    try:
        model_shape.of(configuration)
    except ConfigError as wrong:
        name = wrong.finding.where
        if name in model.config or "text_config" in model.config:
            wrong.amend(where=f"recipe model.config.{name}", fix=f"set model.config.{name} to a whole number")
        else:
            file = f"config.json of {model.name or model.tokenizer}"
            wrong.amend(where=file, fix=f"correct {name} in that file, or set model.config.{name} in the recipe")
        raise


def _counted(recipe: Recipe, configuration: dict[str, Any], *, exact: bool) -> Counted | None:
    """The activations that the model saves, counted by a program that needs torch; it may fail unless `exact`."""
    assert recipe.train is not None
    use = memory.use(recipe, str(configuration.get("model_type")))
    question = {
        "configuration": configuration,
        "masked": recipe.train.objective == "masked",
        "length": use.length,
        "autocast": recipe.train.precision if use.autocast else "",
        "weights": "fp32" if use.residual == 4 else "fp16" if recipe.train.precision == "fp16" else "bf16",
        "attention": "eager" if use.eager else "auto",
        "documents": use.masked,
        "lora": recipe.lora.model_dump() if recipe.lora and recipe.lora.enabled else None,
    }
    argv = [sys.executable, "-m", "dray.train.activations", json.dumps(question)]
    done = process.run(argv, env={"PYTHONDONTWRITEBYTECODE": "1"}, check=False)
    if done.code == 0:
        return Counted.model_validate_json(done.out.splitlines()[-1])
    if exact:
        lines = [line for line in done.err.splitlines() if line.strip()]
        raise ConfigError(
            "--exact cannot build this model here",
            wanted="a Python with torch and transformers, and a model type that transformers knows",
            found=lines[-1][:200] if lines else f"exit code {done.code}",
            fix="leave out --exact for an estimate, or plan in the image",
        )
    return None


def _json(name: str, revision: str, home: str) -> dict[str, Any]:
    """The config.json of a folder or of the hub's cache."""
    folder = Path(name)
    if not name.startswith(("/", ".")):
        cached = _cached(home, "models", name)
        ref = cached / "refs" / revision
        folder = cached / "snapshots" / (read(ref).decode().strip() if ref.is_file() else revision)
    found = parse_json(read(folder / "config.json").decode(), "the model", folder)
    if not isinstance(found, dict):
        raise ConfigError("the model's config.json is no JSON object", where=folder)
    return found


def _cached(home: str, kind: str, name: str) -> Path:
    """The folder in the hub's cache; without HF_HOME the job has no cache."""
    return Path(home or "/nonexistent", "hub", f"{kind}--{name.replace('/', '--')}")


def _missing_on_hub(recipe: Recipe, home: str) -> list[str]:
    hub = [named.removeprefix("hub:").partition(":")[0] for named in recipe.datasets().values() if named[:4] == "hub:"]
    named = {
        "models": [name for name in (recipe.model.name, recipe.model.tokenizer) if name and name[0] not in "/."],
        "datasets": ["/".join(name.split("/")[:2]).partition("@")[0] for name in hub],
    }
    return [
        name for kind, names in named.items() for name in dict.fromkeys(names) if not _cached(home, kind, name).is_dir()
    ]


def _program(command: Command, facts: Facts) -> Iterator[Finding]:
    """Why the command's program cannot be started, as far as this machine can tell."""
    bare = engines.get(facts.engine).image == "python"
    word, script = command.argv[0], command.argv[0].endswith(".py")
    path = Path(command.folder, word)
    why, fix = "", ""
    if facts.scheduler == "slurm" and not facts.login:
        pass  # the nodes report it; this planner runs in a container
    elif "/" not in word and not script:  # from PATH, which an image sets itself
        why = f"{word} is not on PATH" if bare and not process.which(word) else ""
    elif word.startswith("/") and not bare and not path.is_relative_to(command.folder):
        pass  # it may be in the image
    elif path.is_dir():
        why = f"{path} is a folder"
    elif not path.exists():
        names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, names)
        why, fix = f"{path} does not exist", f"did you mean {near}?" if near else ""
    elif not script and not os.access(path, os.X_OK):
        why, fix = f"{path} may not be executed", shlex.join(["chmod", "+x", str(path)])
    if why:
        fix = fix or "correct the path; a relative path starts in the current folder, or in the recipe's folder"
        wanted = "a program that can be started on this machine and in the image"
        yield Finding("the command cannot be started", wanted=wanted, found=why, fix=fix, code=exit_codes.CONFIG)


def _model_type(recipe: Recipe, facts: Facts, configuration: dict[str, Any] | None) -> Iterator[Finding]:
    """A finding if the trainer's transformers lacks this model type; none if the version in use is unknown."""
    if recipe.train is None or configuration is None or recipe.model.trust_remote_code:
        return
    known = tomllib.loads(_TYPES.read_text(encoding="utf-8"))
    kind = configuration.get("model_type")
    if kind in known["types"] or known["transformers"] != _transformers(recipe, facts):
        return
    near = nearest(str(kind), known["types"])
    yield Finding(
        f"transformers {known['transformers']} has no language model of this type",
        where=f"config.json of {recipe.model.name}" if recipe.model.name else "recipe model.type",
        wanted="a type that AutoModelForCausalLM or AutoModelForMaskedLM supports",
        found=str(kind),
        fix=f"did you mean {near}?" if near else "model.type=gpt2",
        code=exit_codes.CONFIG,
    )


def _transformers(recipe: Recipe, facts: Facts) -> str:
    """The version that builds the model: this Python's or the one in the image's lock; empty if unknown."""
    try:
        if engines.get(facts.engine).image == "python":
            return version("transformers")
        lock = (dray_home.root() / "containers" / recipe.image / "requirements.lock").read_text(encoding="utf-8")
    except (OSError, PackageNotFoundError, DrayError):
        return ""
    found = re.search(r"^transformers==([^\s;]+)", lock, re.MULTILINE)
    return found[1] if found else ""


def missing_paths(recipe: Recipe) -> dict[str, str]:
    """The files and folders that the recipe names and this machine does not have, by key."""
    return {key: path for key, path in recipe.places().items() if not (Path(path).exists() or _fits(Path(path)))}


def _fits(pattern: Path) -> bool:
    return any(pattern.parent.glob(pattern.name))
