"""A recipe beside a file in another tool's format: the file decides what the recipe leaves out, and both must agree."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError


class Setting(NamedTuple):
    """A setting that both the recipe and the file have."""

    name: str
    """The recipe's key, with its section."""
    value: Any
    """The file's value, as a recipe writes it."""
    key: str
    """The file's name of the key."""
    written: Any
    """The value in the file."""
    line: int


def settled(recipe: Recipe, settings: Iterable[Setting], path: Path, *, leave: str) -> dict[str, Any]:
    """The recipe's table with the file's values; `leave` is the fix that leaves a key of the file to the recipe."""
    given: dict[str, Any] = recipe.model_dump(exclude_unset=True)
    for name, value, key, written, line in settings:
        section, field = name.split(".")
        values = given.setdefault(section, {})
        theirs = values.get(field)
        if theirs is not None and theirs != value:
            raise ConfigError(
                f"{name} and {key} do not agree",
                where=f"the recipe and {path}",
                wanted=f"{name} = {json.dumps(theirs)}, as the recipe says",
                found=f"{key} = {json.dumps(written)}, on line {line} of {path.name}",
                fix=f"{leave.format(key.split('.')[-1], path.name)}, or make them the same",
            )
        values[field] = value
    return given


def validated(given: dict[str, Any], what: str, path: Path) -> Recipe:
    """Validate that table as a recipe."""
    try:
        return Recipe.model_validate(given)
    except ValidationError as error:
        raise ConfigError(
            f"the recipe and {what} do not fit together",
            where=f"the recipe and {path}",
            found="; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors()),
        ) from error
