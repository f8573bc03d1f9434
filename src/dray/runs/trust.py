"""Whose run it is, and which code of somebody else's it would run here."""

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
"""Sections of DeepSpeed's configuration that hold nothing but numbers and switches."""


def foreign(paths: RunPaths) -> str:
    """What of a run another user owns, or may write, in words; empty for this user's and for root's."""
    for path in (paths.run, paths.folder, paths.plan):
        if not files.is_own(path):
            found = path.stat()
            return f"{path} of user {found.st_uid}, mode {found.st_mode & 0o7777:04o}"
    return ""


def require(code: Sequence[str], where: str, *, does: str) -> None:
    """Refuse the code of another user's run, which `does` would run here."""
    if code:
        raise ConfigError(
            f"this run was not recorded here by you, and {does} runs code that it names",
            where=where,
            wanted="--trust-run, once you have read it",
            found="\n".join(code),
            fix="the same with --trust-run",
        )


def code_of(recipe: Recipe) -> list[str]:
    """What a replay of it would run, a line each. A layer by its name is this user's own."""
    found = [f"command: {' '.join(recipe.command.argv)}"] if recipe.command else []
    found += functions(recipe.maps().items())
    found += ["model.trust_remote_code = true"] if recipe.model.trust_remote_code else []
    found += [f"layer = {recipe.layer}"] if recipe.layer and recipe.layer.endswith(".sif") else []
    found += [f"env.{name} = {value}" for name, value in recipe.env.items() if not _HARMLESS.fullmatch(name)]
    found += _of_deepspeed(recipe.train.deepspeed) if recipe.train and recipe.train.deepspeed else []
    return found


def functions(maps: Iterable[tuple[str, str]]) -> list[str]:
    """Functions on rows, which run wherever datasets are read, a line each."""
    return [f"{key}: {text.partition(chr(10))[0]}" for key, text in sorted(maps)]


def _of_deepspeed(text: str) -> list[str]:
    """What of its configuration may name files and programs: profilers and monitors write where they are told."""
    file = files.parse_json(text, "DeepSpeed's configuration in the capsule", "train.deepspeed")
    if not isinstance(file, dict):
        return [f"train.deepspeed: {text[:200]}"]
    told = {key: value for key, value in file.items() if isinstance(value, dict | list) and key not in _OF_TRAINING}
    told |= {key: value for key, value in file.items() if "/" in json.dumps(value)}
    return [f"train.deepspeed: {key} = {json.dumps(value)[:200]}" for key, value in told.items()]
