"""Who owns a run, and which code of another user it would run here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from dray.config.recipe import Recipe
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.runs.paths import RunPaths

_HARMLESS = re.compile("(?:[A-Z]+_NUM_THREADS|HF_[A-Z]+_OFFLINE|TOKENIZERS_PARALLELISM)")
_OF_TRAINING = {"zero_optimization", "fp16", "bf16", "data_types", "activation_checkpointing"}
"""Sections of DeepSpeed's configuration with only numbers and switches."""


def foreign(paths: RunPaths) -> str:
    """The part of a run that another user owns or may write, in words; empty if only this user and root do."""
    for path in (paths.run, paths.folder, paths.plan):
        if not files.is_own(path):
            found = path.stat()
            return f"{path} of user {found.st_uid}, mode {found.st_mode & 0o7777:04o}"
    return ""


def require(code: Sequence[str], where: str, *, does: str) -> None:
    """Refuse to run the code of another user's run; `does` names what would run it."""
    if code:
        raise ConfigError(
            f"you did not record this run here, and {does} runs code that it names",
            where=where,
            wanted="--trust-run, after you have read that code",
            found="\n".join(code),
            fix="add --trust-run to the command",
        )


def code_of(recipe: Recipe) -> list[str]:
    """The code that a replay would run, one line each. A layer given by name is this user's own."""
    found = [f"command: {' '.join(recipe.command.argv)}"] if recipe.command else []
    found += functions(recipe.maps().items())
    found += ["model.trust_remote_code = true"] if recipe.model.trust_remote_code else []
    found += [f"layer = {recipe.layer}"] if recipe.layer and recipe.layer.endswith(".sif") else []
    found += [f"env.{name} = {value}" for name, value in recipe.env.items() if not _HARMLESS.fullmatch(name)]
    found += _of_deepspeed(recipe.train.deepspeed) if recipe.train and recipe.train.deepspeed else []
    return found


def functions(maps: Iterable[tuple[str, str]]) -> list[str]:
    """The row functions, which run wherever datasets are read, one line each."""
    return [f"{key}: {text.partition(chr(10))[0]}" for key, text in sorted(maps)]


def _of_deepspeed(text: str) -> list[str]:
    """The parts of DeepSpeed's configuration that may name files and programs, such as profilers and monitors."""
    file = files.parse_json(text, "DeepSpeed's configuration in the capsule", "train.deepspeed")
    if not isinstance(file, dict):
        return [f"train.deepspeed: {text[:200]}"]
    told = {key: value for key, value in file.items() if isinstance(value, dict | list) and key not in _OF_TRAINING}
    told |= {key: value for key, value in file.items() if "/" in json.dumps(value)}
    return [f"train.deepspeed: {key} = {json.dumps(value)[:200]}" for key, value in told.items()]
