"""Read a run's JSON files, damaged or not, as plain tables: validation would be slow for thousands of runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, WrapValidator
from pydantic_core import from_json

from dray.config.load_toml import explained
from dray.contract import files
from dray.contract.findings import ConfigError, DrayError

RECORD = 1 << 20
"""Bytes of a record, a report or a line of metrics."""
VERSION = 1
"""The version of result.json."""
Table = dict[str, Any]


def _or_none(told: object, check: Callable[[object], object]) -> object:
    with suppress(ValidationError):
        return check(told)
    return None


OR_NONE = WrapValidator(_or_none)
"""Reads a damaged part of a file as None, so that the rest stays readable."""


def table(
    path: Path | str, warnings: list[str], check: Callable[[object, Path | str], None] = lambda *_: None
) -> Table | None:
    """The file's JSON object; None if the file is missing, or, with a warning, if it cannot be read."""
    try:
        found = from_json(files.read(path))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        check(found, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.append(f"{path} cannot be read: {reason(error)}")
        return None
    return found


Model = TypeVar("Model", bound=BaseModel)


def load(model: type[Model], path: Path, noun: str, *, fix: str) -> Model:
    """The content of a file of dray's own; ConfigError if it is missing, damaged or of another version."""
    text = files.text(path, f"the {noun}", fix=fix)
    found = files.parse_json(text, f"the {noun}", path)
    version, known = found.get("version") if isinstance(found, dict) else None, model.model_fields["version"].default
    if version != known:
        raise ConfigError(
            f"this {noun} was made by another version of dray", where=path, wanted=f"version {known}",
            found=f"version {version!r:.40}",
        )  # fmt: skip
    try:
        return model.model_validate_json(text)
    except ValidationError as wrong:
        raise ConfigError(f"the {noun} is damaged", where=path, found=explained(wrong)) from wrong


def require_version(found: object, path: Path | str) -> None:
    """Raise OSError if the result is no JSON object or has another version."""
    version = found.get("version", VERSION) if isinstance(found, dict) else None
    if version != VERSION:
        wrong = f"result version {ascii(version)[:40]}, but this dray reads {VERSION}"
        raise OSError(errno.EINVAL, wrong if isinstance(found, dict) else "no JSON object", str(path))


def dig(value: Any, *names: str) -> Any:  # noqa: ANN401  any JSON value
    """The value at a path of names in nested tables; None if it is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def written(path: Path | str) -> float | None:
    """When the file was last written; None if it is missing."""
    try:
        return os.lstat(path).st_mtime
    except (OSError, ValueError):
        return None


def reason(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, DrayError):
        text = ": ".join(filter(None, [error.problem, error.finding.found]))
    else:
        text = (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]
