"""Plan a run and write it down: after this the run folder holds all that a node needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from dray import __version__, render
from dray.facts import Facts, to_text
from dray.plan import Plan, plan
from dray.runs.paths import create, new_id, reopen
from dray.spec.model import load
from dray.spec.recipe import Recipe
from dray.spec.site import find


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with the command line's overrides. A relative text file lies beside the recipe, wherever we stand."""
    recipe = load(Recipe, path, overrides)
    if recipe.data.text == "builtin":
        return recipe
    text = str(path.absolute().parent / recipe.data.text)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"text": text})})


def decide(recipe: Recipe, facts: Facts, *, run: str, folder: Path) -> Plan:
    """The plan of this recipe on these facts, for the site that the facts name."""
    site = find(facts.site)
    return plan(recipe, site, facts, run=run, folder=PurePosixPath(folder), dray=__version__)


def write(recipe: Recipe, facts: Facts, *, runs: Path, run: str | None = None) -> Plan:
    """Decide first, so that a run that cannot be leaves no folder; then write plan.json and node.sh.

    `run` is the id of a folder that `dray submit` has made and whose job this is.
    """
    name = run or new_id(recipe.name, job=facts.job)
    decided = decide(recipe, facts, run=name, folder=runs / name)
    paths = reopen(runs, name) if run else create(runs, name)
    paths.facts.write_text(to_text(facts), encoding="utf-8")
    paths.plan.write_text(decided.model_dump_json(indent=1) + "\n", encoding="utf-8")
    paths.node_script.write_text(render.node_script(decided), encoding="utf-8")
    paths.node_script.chmod(0o755)
    return decided
