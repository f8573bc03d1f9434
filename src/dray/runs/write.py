"""Plan a run and write it down: after this the run folder holds all that a node needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dray import __version__, render
from dray.config import deepspeed, sites
from dray.config.model import check, load
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.facts import Facts, to_text
from dray.planning.plan import Plan, plan
from dray.runs.paths import RunPaths, TakenError, create, new_id, reopen


def read_recipe(path: Path | None, overrides: Sequence[str] = (), command: Sequence[str] = ()) -> Recipe:
    """The recipe with the command line's overrides; a command alone is a recipe too.

    Relative paths in a recipe start beside it, wherever we stand; a command on the command line runs where we stand.
    """
    if path is None:
        name = re.sub("[^a-z0-9._-]", "-", PurePosixPath(command[0]).stem.lower()).lstrip("._-")[:63] or "run"
        recipe = check(Recipe, {"name": name, "command": {"argv": [*command]}}, overrides, what="the command's recipe")
    else:
        recipe = load(Recipe, path, overrides)
    beside = path.absolute().parent if path else Path.cwd()
    recipe = _placed(recipe, beside)
    if recipe.accelerate:
        recipe = _with(recipe, ["accelerate"], _read(beside / recipe.accelerate))
    if recipe.train and recipe.train.deepspeed:
        file = beside / recipe.train.deepspeed
        recipe = deepspeed.agreed(recipe, _read(file), file)
    return recipe


def over(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A run's own recipe with the command line's overrides, whose relative paths start where we stand."""
    table = recipe.model_dump(exclude_unset=True)
    return _placed(check(Recipe, table, overrides, what="the run's recipe"), Path.cwd())


def _placed(recipe: Recipe, beside: Path) -> Recipe:
    """With relative places that start there."""
    places = recipe.all_places() | ({"command.folder": recipe.command.folder} if recipe.command else {})
    for key, named in places.items():
        recipe = _with(recipe, key.split("."), str(beside / named))
    return recipe


def _with(table: Any, keys: Sequence[str], value: str) -> Any:  # noqa: ANN401  a spec, or a table of specs
    """The same with another value in that place."""
    key, *rest = keys
    if isinstance(table, dict):
        return {**table, key: _with(table[key], rest, value)}
    return table.model_copy(update={key: _with(getattr(table, key), rest, value) if rest else value})


def _begun(
    recipe: Recipe, facts: Facts, runs: Path, run: str | None, name: str, *, may_differ: bool
) -> tuple[Plan, RunPaths]:
    if run:
        return decide(recipe, facts, run=run, folder=runs / run), reopen(runs, run)
    number = 1
    while True:  # two steps of one job may begin in the same second
        numbered = name if number == 1 else f"{name}-{number}"
        decided = decide(recipe, facts, run=numbered, folder=runs / numbered)
        try:
            return decided, create(runs, numbered)
        except TakenError:
            if not may_differ:
                raise
            number += 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("a file that the recipe names cannot be read", where=path, found=error) from error


def decide(recipe: Recipe, facts: Facts, *, run: str, folder: Path) -> Plan:
    """The plan of this recipe on these facts, for the site that the facts name."""
    site, why = sites.choose(facts)
    return plan(recipe, site, facts, run=run, folder=PurePosixPath(folder), dray=__version__, site_why=why)


def write(recipe: Recipe, facts: Facts, *, runs: Path, run: str | None = None, name: str | None = None) -> Plan:
    """Decide first, so that a run that cannot be leaves no folder; then write plan.json and node.sh.

    `run` is the id of a folder that `dray submit` has made and whose job this is, `name` that of a new one.
    """
    decided, paths = _begun(recipe, facts, runs, run, name or new_id(recipe.name, job=facts.job), may_differ=not name)
    paths.facts.write_text(to_text(facts), encoding="utf-8")
    paths.plan.write_text(decided.model_dump_json(indent=1) + "\n", encoding="utf-8")
    for name_of, text in decided.files.items():
        (paths.folder / name_of).write_text(text, encoding="utf-8")
    paths.node_script.write_text(render.node_script(decided), encoding="utf-8")
    paths.node_script.chmod(0o755)
    if decided.engine == "pyxis":
        paths.srun_options.write_text(render.srun_options(decided), encoding="utf-8")
    return decided
