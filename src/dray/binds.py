"""What of the host the container sees, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict

from dray.facts import Facts
from dray.spec.recipe import Recipe
from dray.spec.site import Site


class Bind(BaseModel):
    """One folder or file of the host, seen at the same place inside."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    write: bool
    source: str
    why: str


def resolve(recipe: Recipe, site: Site, facts: Facts, *, folder: PurePosixPath) -> tuple[Bind, ...]:
    """All binds, each place once; who needs to write decides."""
    chosen: dict[str, Bind] = {}
    for bind in _wanted(recipe, site, facts, folder):
        known = chosen.get(bind.path)
        if known is None or (bind.write and not known.write):
            chosen[bind.path] = bind
    return tuple(chosen.values())


def _wanted(recipe: Recipe, site: Site, facts: Facts, folder: PurePosixPath) -> Iterator[Bind]:
    yield Bind(path=str(folder), write=True, source="dray", why="the run folder: plan, logs, metrics, checkpoints")
    if recipe.command:
        yield Bind(path=recipe.command.folder, write=True, source="recipe command.folder", why="where the command runs")
    if facts.hf_home and "HF_HOME" not in recipe.env:
        yield Bind(path=facts.hf_home, write=True, source="HF_HOME", why="models and datasets that are there already")
    if recipe.data.text != "builtin":
        yield Bind(path=recipe.data.text, write=False, source="recipe data.text", why="the text to train on")
    for wanted in site.binds:
        yield Bind(path=wanted.path, write=wanted.write, source=f"site {site.name}", why=wanted.why)
