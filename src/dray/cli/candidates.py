"""What a shell may complete beside files: recipes, their keys and values, runs, sites, remotes.

Each verb names these functions, and only a TAB calls one: so a function imports what it needs itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from dray.contract.findings import DrayError

# A name with other characters is not offered: a shell would have to quote it.
_PLAIN = re.compile(r"[\w.,+@%:/~=-]+")
Completer = Callable[[typer.Context, list[str], str], list[str]]


def _quiet(find: Callable[[typer.Context, str], Iterable[str]]) -> Completer:
    """What cannot be read completes nothing."""

    def complete(context: typer.Context, _args: list[str], incomplete: str) -> list[str]:
        try:
            found = sorted(set(find(context, incomplete)))
        except (DrayError, OSError):
            return []
        return [word for word in found if word.startswith(incomplete) and _PLAIN.fullmatch(word)]

    return complete


@_quiet
def runs(context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of runs."""
    from dray.runs import store  # noqa: PLC0415

    return [run.name for run in store.newest_first(Path(context.params.get("runs") or store.default_runs()))]


@_quiet
def sites(_context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of sites."""
    from dray.config import sites  # noqa: PLC0415

    return sites.files()


@_quiet
def remotes(_context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of remotes."""
    from dray.remote import remotes_file  # noqa: PLC0415

    return remotes_file.read()


@_quiet
def recipes(_context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of the recipes that come with dray; the shell itself completes files."""
    return recipe_files()


def recipe_files() -> dict[str, Path]:
    """The recipes that come with dray, by name. Other TOML may be beside them in a user's own checkout."""
    from dray.config import dray_home  # noqa: PLC0415

    folder = dray_home.root() / "recipes"
    paths = [*sorted(folder.glob("*.toml")), *sorted(folder.glob("*/*.toml"))]
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


@_quiet
def keys(_context: typer.Context, incomplete: str) -> Iterable[str]:
    """Each key of a recipe with its =; after the =, the key's values if they are few."""
    from dray.config.describe_keys import Schema  # noqa: PLC0415
    from dray.config.recipe import Recipe  # noqa: PLC0415

    kinds = {key: kind for key, kind, *_ in Schema(Recipe).describe() if "[]" not in key and ".NAME" not in key}
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{key}." if kind.startswith("a table") else f"{key}=" for key, kind in kinds.items()]
    return [f"{name}={value}" for value in re.findall(r'(?<=")[\w.-]+(?=")|true|false', kinds.get(name, ""))]


def recipe_or_key(context: typer.Context, args: list[str], incomplete: str) -> list[str]:
    """The recipe comes first, and settings after it."""
    begun = context.params.get("arguments") or "=" in incomplete
    return (keys if begun else recipes)(context, args, incomplete)
