"""The models, datasets and programs of a recipe that exist on this machine, looked up once for the plan."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dray import engines, process
from dray.config import dray_home
from dray.config.recipe import Command, Recipe
from dray.contract import dataset_name, exit_codes
from dray.contract.files import parse_json, read
from dray.contract.findings import ConfigError, DrayError, Finding, nearest
from dray.facts import Counted, Facts, Files
from dray.images.locks import lock
from dray.planning.estimates import memory

_TYPES = Path(__file__).with_name("model_types.toml")


def files(recipe: Recipe, facts: Facts) -> Files:
    """What the plan needs to know of files. A job's planner sees only HF_HOME: the nodes check other paths."""
    if recipe.command:
        return Files(findings=tuple(_program(recipe.command, facts)))
    home = Path(recipe.env.get("HF_HOME", facts.hf_home) or "/nonexistent", "hub")
    configuration = _configuration(recipe, home)
    return Files(
        configuration=configuration,
        counted=_counted(recipe, configuration) if configuration else None,
        findings=tuple(_model_type(recipe, facts, configuration)) if configuration else (),
        missing_on_hub=tuple(_missing_on_hub(recipe, home)),
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


def _configuration(recipe: Recipe, home: Path) -> dict[str, Any] | None:
    """The model's config.json, as transformers will read it."""
    model = recipe.model
    try:
        if model.name:
            return {**_read(model.name, model.revision, home), **model.config}
        tokenizer = _read(model.tokenizer, model.tokenizer_revision, home) if model.tokenizer else {}
    except (OSError, ValueError, ConfigError):  # the nodes report what is wrong
        return None
    vocabulary = tokenizer.get("vocab_size", 257)  # without a tokenizer, one for each byte
    return {"model_type": model.type, "vocab_size": vocabulary, **model.config}


def _read(name: str, revision: str, home: Path) -> dict[str, Any]:
    """The config.json of a folder or of the hub's cache."""
    folder = Path(name)
    if not name.startswith(("/", ".")):
        cached = _cached(home, "models", name)
        ref = cached / "refs" / revision
        folder = cached / "snapshots" / (read(ref).decode().strip() if ref.is_file() else revision)
    found = parse_json(read(folder / "config.json").decode(), "the model", folder)
    return found if isinstance(found, dict) else {}


def _cached(home: Path, kind: str, name: str) -> Path:
    return home / f"{kind}--{name.replace('/', '--')}"


def _missing_on_hub(recipe: Recipe, home: Path) -> Iterator[str]:
    models = [name for name in (recipe.model.name, recipe.model.tokenizer) if name and name[0] not in "/."]
    named = [("models", name) for name in models]
    for name in recipe.datasets().values():
        dataset = dataset_name.parse(name)
        if dataset.builder == dataset_name.HUB:  # OWNER/NAME[@REVISION][/SUBSET]
            named.append(("datasets", "/".join(dataset.files.partition("@")[0].split("/")[:2])))
    for kind, name in dict.fromkeys(named):
        if not _cached(home, kind, name).is_dir():
            yield name


def _counted(recipe: Recipe, configuration: dict[str, Any]) -> Counted | None:
    """In an image, the activations that the model saves, counted by a program that needs torch; not if it compiles."""
    train = recipe.train
    in_image = Path(sys.prefix, "image.json").is_file() and recipe.image != "cpu"
    if train is None or not in_image or train.compile:  # "auto" compiles, too
        return None
    use = memory.use(recipe, str(configuration.get("model_type")))
    narrow = "fp16" if train.precision == "fp16" else "bf16"
    question = {
        "configuration": configuration,
        "masked": train.objective == "masked",
        "length": use.length,
        "autocast": train.precision if use.autocast else "",
        "weights": "fp32" if use.residual == 4 else narrow,
        "attention": "eager" if use.eager else "auto",
        "documents": use.masked,
        "lora": recipe.lora.model_dump() if recipe.lora and recipe.lora.enabled else None,
    }
    argv = [sys.executable, "-m", "dray.train.activations", json.dumps(question)]
    done = process.run(argv, env={"PYTHONDONTWRITEBYTECODE": "1"}, check=False)
    # If it fails, the trainer says what is wrong with the model.
    return None if done.code else Counted.model_validate_json(done.out.splitlines()[-1])


def _program(command: Command, facts: Facts) -> Iterator[Finding]:
    """Why the command's program cannot be started, as far as this machine can tell."""
    if facts.scheduler == "slurm" and not facts.login:
        return  # the nodes report it; this planner runs in a container
    is_bare = engines.get(facts.engine).image == "python"
    word, path = command.argv[0], Path(command.folder, command.argv[0])
    is_script = word.endswith(".py")
    found, fix = "", "correct the path; a relative path starts in the current folder, or in the recipe's folder"
    if "/" not in word and not is_script:  # from PATH, which an image sets itself
        if is_bare and not process.which(word):
            found = f"{word} is not on PATH"
    elif word.startswith("/") and not is_bare and not path.is_relative_to(command.folder):
        return  # it may be in the image
    elif not path.is_file():
        found = f"{path} is not a file"
        near = nearest(path.name, [other.name for other in path.parent.glob("*") if other.is_file()])
        if near:
            fix = f"did you mean {near}?"
    elif not is_script and not os.access(path, os.X_OK):
        found, fix = f"{path} may not be executed", shlex.join(["chmod", "+x", str(path)])
    if found:
        wanted = "a program that can be started on this machine and in the image"
        yield Finding("the command cannot be started", wanted=wanted, found=found, fix=fix, code=exit_codes.CONFIG)


def _model_type(recipe: Recipe, facts: Facts, configuration: dict[str, Any]) -> Iterator[Finding]:
    """A finding if the image's transformers lacks this model type; none if its version is unknown."""
    known = tomllib.loads(_TYPES.read_text(encoding="utf-8"))
    kind = str(configuration.get("model_type"))
    if kind in known["types"] or recipe.model.trust_remote_code or engines.get(facts.engine).image == "python":
        return
    try:
        pins = lock.read(dray_home.root() / "containers" / recipe.image / "requirements.lock")
    except (OSError, DrayError):
        return
    if ("transformers", known["transformers"]) not in [(pin.name, pin.version) for pin in pins]:
        return
    near = nearest(kind, known["types"])
    yield Finding(
        f"transformers {known['transformers']} has no language model of this type",
        where=f"config.json of {recipe.model.name}" if recipe.model.name else "recipe model.type",
        wanted="a type that AutoModelForCausalLM or AutoModelForMaskedLM supports",
        found=kind,
        fix=f"did you mean {near}?" if near else "model.type=gpt2",
        code=exit_codes.CONFIG,
    )
