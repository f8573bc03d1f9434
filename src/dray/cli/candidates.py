"""What a shell may complete: recipes, their keys and values, runs, sites, remotes.

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
    from dray.remote import names  # noqa: PLC0415

    return names.read()


def _recipes(begun: str) -> list[str]:
    """Folders and .toml files, as any shell completes them, and the names of the recipes that come with dray."""
    from dray.config import dray_home  # noqa: PLC0415

    folder = begun.rpartition("/")[0] + "/" * ("/" in begun)
    names = [f"{folder}{path.name}{'/' * path.is_dir()}" for path in Path(folder or ".").expanduser().iterdir()
             if path.name[0] != "." and (path.suffix == ".toml" or path.is_dir())]  # fmt: skip
    own = [] if folder else (dray_home.root() / "recipes").glob("*.toml")
    return [*names, *(path.stem for path in own)]


def _keys(begun: str) -> list[str]:
    """Each key with its =; after the =, the key's values if they are few."""
    from dray.config import dray_home  # noqa: PLC0415
    from dray.config.describe_keys import Schema  # noqa: PLC0415
    from dray.config.recipe import Recipe  # noqa: PLC0415
    from dray.images import store  # noqa: PLC0415

    name, equals, _ = begun.partition("=")
    kinds = {key: kind for key, kind, *_ in Schema(Recipe).describe() if "[]" not in key and ".NAME" not in key}
    if not equals:
        return [f"{key}." if kind.startswith("a table") else f"{key}=" for key, kind in kinds.items()]
    if name == "adopted":
        values = [*store.adopted_names(dray_home.root())]
    else:
        kind = kinds.get(name, "")
        values = re.findall(r'"([^"]*)"', kind) + (["true", "false"] if "true or false" in kind else [])
    return [f"{name}={value}" for value in values]


recipes = _quiet(lambda _context, begun: _recipes(begun))
keys = _quiet(lambda _context, begun: _keys(begun))


@_quiet
def key_names(_context: typer.Context, begun: str) -> Iterable[str]:
    """The names of keys and of their tables."""
    found = [key.rstrip("=.") for key in _keys(begun)]
    return [*found, *(key.partition(".")[0] for key in found)]


@_quiet
def recipe_or_key(context: typer.Context, begun: str) -> Iterable[str]:
    """The recipe comes first, and settings after it."""
    return _keys(begun) if context.params.get("arguments") or "=" in begun else _recipes(begun)
