"""The folders and files of the host that the container sees, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from string import Template

from dray.config.recipe import Recipe
from dray.config.site import Site, SiteBind
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning import environment
from dray.planning.schema import Bind, Variable


def resolve(
    recipe: Recipe, site: Site, facts: Facts, variables: Sequence[Variable], *, run_folder: PurePosixPath, scratch: str
) -> tuple[Bind, ...]:
    """All binds, each path once: with write access if one of its binds asks for it."""
    chosen: dict[str, Bind] = {}
    for bind in (
        *_dray(facts, run_folder),
        *_recipe(recipe),
        *_site(site, facts),
        *_caches(variables, facts, run_folder, scratch),
    ):
        known = chosen.get(bind.path)
        if known is None or (bind.write and not known.write):
            chosen[bind.path] = bind
    return tuple(chosen.values())


def _dray(facts: Facts, run_folder: PurePosixPath) -> Iterator[Bind]:
    yield Bind(path=str(run_folder), write=True, source="dray", why="the run folder: plans, logs, metrics, checkpoints")
    if facts.adopted:
        for path, why in (
            (facts.adopted, "packages that the adopted image lacks"),
            (facts.adopted_source, "dray, which the image lacks"),
        ):
            yield Bind(path=path, write=False, source="dray image adopt", why=why)


def _recipe(recipe: Recipe) -> Iterator[Bind]:
    if recipe.command:
        yield Bind(path=recipe.command.folder, write=True, source="recipe command.folder", why="where the command runs")
    for key, named in recipe.places().items():
        why = "the training dataset" if key.startswith(("data.train", "data.mix.")) else "the recipe reads it"
        path = PurePosixPath(named)
        pattern = "*" in path.stem and path.suffix[1:].isalnum()  # such as train-*.parquet: its folder
        yield Bind(path=str(path.parent if pattern else path), write=False, source=f"recipe {key}", why=why)
    for folder, key, why in (
        (recipe.checkpoint.folder, "checkpoint.folder", "checkpoints that this run resumes from"),
        (recipe.checkpoint.mirror_folder, "checkpoint.mirror", "copies of the checkpoints"),
        (recipe.data.cache_dir, "data.cache_dir", "the tokenized datasets"),
    ):
        if folder:
            yield Bind(path=folder, write=True, source=f"recipe {key}", why=why, made=True)


def _site(site: Site, facts: Facts) -> Iterator[Bind]:
    for wanted in site.binds:
        if path := _filled(wanted, site, facts):
            source = f"site {site.name}" + (f" {wanted.path}" if path != wanted.path else "")
            yield Bind(path=path, write=wanted.write, source=source, why=wanted.why, required=wanted.required)


def _caches(variables: Sequence[Variable], facts: Facts, run_folder: PurePosixPath, scratch: str) -> Iterator[Bind]:
    """The cache folders outside of the run folder and the node's own folder."""
    beside = environment.caches(facts, run_folder.parent)
    for variable in variables:
        path = PurePosixPath(variable.value)
        if variable.name not in environment.CACHES or not path.is_absolute():
            continue
        if path.is_relative_to(beside):
            yield Bind(path=str(beside), write=True, source="dray", why="the caches of libraries", made=True)
        elif not path.is_relative_to(run_folder) and not path.is_relative_to(scratch):
            why = "what its library downloads or makes"
            yield Bind(path=variable.value, write=True, source=variable.name, why=why, made=True)


def _filled(wanted: SiteBind, site: Site, facts: Facts) -> str:
    """The path with the values of the job's variables; empty if one is not set and the bind is not required."""
    if "$" not in wanted.path or facts.login:  # the login node's own variables need not be the job's
        return wanted.path
    path = Template(wanted.path).safe_substitute(facts.variables)
    where = f"site {site.name}"
    if not path.startswith("/") or "$" in path:
        if not wanted.required:
            return ""
        raise ConfigError(
            f"the site binds {wanted.path}, which is no path in this job",
            where=where,
            found=path,
            fix="set the variable before you submit, or write a site file of your own without it (dray site show)",
        )
    if facts.home and PurePosixPath(facts.home).is_relative_to(path):
        raise ConfigError(
            f"{wanted.path} would bring your home into the container",
            where=where,
            found=path,
            fix="set the variable to another folder: what is in a home (~/.local, ~/.cache) breaks images",
        )
    return path
