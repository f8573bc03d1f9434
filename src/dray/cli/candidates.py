"""What a shell may complete: recipes, their keys and values, runs, sites. What cannot be read completes nothing.

Each verb names these functions, and only a TAB calls one: so a function imports what it needs itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

from dray.contract.findings import DrayError
from dray.remote import names
from dray.runs.store import default_runs, newest_first

# A name with other characters is not offered: a shell would have to quote it.
_PLAIN = re.compile(r"[\w.,+@%:/~=-]+")
Completer = Callable[[typer.Context, list[str], str], list[str]]


def _quiet(find: Callable[[typer.Context, str], Iterator[str]]) -> Completer:
    def complete(context: typer.Context, args: list[str], incomplete: str) -> list[str]:  # noqa: ARG001
        try:
            found = sorted(set(find(context, incomplete)))
        except (DrayError, OSError):
            return []
        return [word for word in found if word.startswith(incomplete) and _PLAIN.fullmatch(word)]

    return complete


def _runs(context: typer.Context, incomplete: str) -> Iterator[str]:  # noqa: ARG001
    folder = context.params.get("runs") or default_runs()
    return (run.name for run in newest_first(Path(folder)))


def _sites(context: typer.Context, incomplete: str) -> Iterator[str]:  # noqa: ARG001
    from dray.config import sites  # noqa: PLC0415

    return iter(sites.files())


def _recipes(context: typer.Context, incomplete: str) -> Iterator[str]:  # noqa: ARG001
    """Folders and .toml files, as any shell completes them, and the names of the recipes that come with dray."""
    from dray.config import dray_home  # noqa: PLC0415

    begun = incomplete.rpartition("/")[0] + "/" * ("/" in incomplete)
    for path in Path(begun or ".").expanduser().iterdir():
        hidden = path.name.startswith(".")
        if not hidden and (path.suffix == ".toml" or path.is_dir()):
            yield begun + path.name + "/" * path.is_dir()
    if not begun:
        yield from (path.stem for path in (dray_home.root() / "recipes").glob("*.toml"))


def _keys(context: typer.Context, incomplete: str) -> Iterator[str]:  # noqa: ARG001
    """Each key with its =; after the =, the key's values if they are few."""
    from dray.config import dray_home  # noqa: PLC0415
    from dray.config.describe_keys import Schema  # noqa: PLC0415
    from dray.config.recipe import Recipe  # noqa: PLC0415
    from dray.images import store  # noqa: PLC0415

    name, equals, _ = incomplete.partition("=")
    for key, kind, *_ in Schema(Recipe).describe():
        if "[]" in key or ".NAME" in key:
            continue
        if not equals:
            yield f"{key}=" if not kind.startswith("a table") else f"{key}."
        elif key == name == "adopted":
            yield from (f"adopted={adopted}" for adopted in store.adopted_names(dray_home.root()))
        elif key == name:
            choices = re.findall(r'"([^"]*)"', kind) + (["true", "false"] if "true or false" in kind else [])
            yield from (f"{key}={choice}" for choice in choices)


def _key_names(context: typer.Context, incomplete: str) -> Iterator[str]:
    for key in _keys(context, incomplete):
        yield key.rstrip("=.")
        yield key.partition(".")[0].rstrip("=")


def _recipe_or_key(context: typer.Context, incomplete: str) -> Iterator[str]:
    """The recipe comes first, and settings after it."""
    given = context.params.get("arguments") or ()
    return _keys(context, incomplete) if given or "=" in incomplete else _recipes(context, incomplete)


runs, sites, recipes, keys = _quiet(_runs), _quiet(_sites), _quiet(_recipes), _quiet(_keys)
recipe_or_key, key_names = _quiet(_recipe_or_key), _quiet(_key_names)


def one_of(names: Iterable[str]) -> Completer:
    """A completer for an option with a few fixed values."""
    return _quiet(lambda context, incomplete: iter(names))  # noqa: ARG005


def _remotes(context: typer.Context, incomplete: str) -> Iterator[str]:  # noqa: ARG001
    return iter(names.read())


remotes = _quiet(_remotes)
