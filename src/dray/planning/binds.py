"""The folders and files of the host that the container sees, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from string import Template

from pydantic import BaseModel, ConfigDict

from dray.config.recipe import Recipe
from dray.config.site import Site, SiteBind
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning import caches
from dray.planning.environment import Variable


class Bind(BaseModel):
    """One folder or file of the host, seen at the same place inside."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: str
    """The path on the host, and the same in the container."""
    write: bool
    """Whether the ranks may write there."""
    source: str
    """Who asks for it: dray, the site, or a key of the recipe."""
    why: str
    """What it is for."""
    required: bool = True
    """Whether a node without it is unfit; else the node goes on without the bind."""
    made: bool = False
    """Whether the node creates the folder if it is missing."""

    @property
    def origin(self) -> str:
        """Who asks for it, and why."""
        return f"{self.source}: {self.why}"


def resolve(
    recipe: Recipe, site: Site, facts: Facts, variables: Sequence[Variable], *, run_folder: PurePosixPath, scratch: str
) -> tuple[Bind, ...]:
    """All binds, each path once: with write access if one of its binds asks for it."""
    chosen: dict[str, Bind] = {}
    named = [(variable.name, variable.value) for variable in variables]
    for bind in (*_wanted(recipe, site, facts, run_folder), *_caches(named, facts, run_folder, scratch)):
        known = chosen.get(bind.path)
        if known is None or (bind.write and not known.write):
            chosen[bind.path] = bind
    return tuple(chosen.values())


def _wanted(recipe: Recipe, site: Site, facts: Facts, run_folder: PurePosixPath) -> Iterator[Bind]:
    yield Bind(path=str(run_folder), write=True, source="dray", why="the run folder: plans, logs, metrics, checkpoints")
    if facts.adopted:
        why = "packages that the adopted image lacks"
        yield Bind(path=facts.adopted, write=False, source="dray image adopt", why=why)
        yield Bind(path=facts.adopted_source, write=False, source="dray image adopt", why="dray, which the image lacks")
    if recipe.command:
        yield Bind(path=recipe.command.folder, write=True, source="recipe command.folder", why="where the command runs")
    for key, named in recipe.places().items():
        why = "the training dataset" if key.startswith(("data.train", "data.mix.")) else "the recipe reads it"
        yield Bind(path=_whole(named), write=False, source=f"recipe {key}", why=why)
    for folder, key, why in (
        (recipe.checkpoint.folder, "checkpoint.folder", "checkpoints that this run resumes from"),
        (recipe.checkpoint.mirror_folder, "checkpoint.mirror", "copies of the checkpoints"),
        (recipe.data.cache_dir, "data.cache_dir", "the tokenized datasets"),
    ):
        if folder:
            yield Bind(path=folder, write=True, source=f"recipe {key}", why=why, made=True)
    for wanted in site.binds:
        path = _filled(wanted, site, facts)
        if path:
            source = f"site {site.name}" + (f" {wanted.path}" if path != wanted.path else "")
            yield Bind(path=path, write=wanted.write, source=source, why=wanted.why, required=wanted.required)


def _caches(
    variables: Sequence[tuple[str, str]], facts: Facts, run_folder: PurePosixPath, scratch: str
) -> Iterator[Bind]:
    for cache in caches.outside(variables, facts, run_folder=run_folder, scratch=scratch):
        yield Bind(path=cache.path, write=True, source=cache.name, why=cache.why, made=True)


def _whole(named: str) -> str:
    """The file or folder itself; for a pattern, such as `train-*.parquet`, the folder that it is in."""
    path = PurePosixPath(named)
    return str(path.parent if "*" in path.stem and path.suffix[1:].isalnum() else path)


def _filled(wanted: SiteBind, site: Site, facts: Facts) -> str:
    """The path with the values of the job's variables; empty if one is not set and the bind is not required."""
    if "$" not in wanted.path or facts.login:  # the login node's own variables need not be the job's
        return wanted.path
    path = Template(wanted.path).safe_substitute(facts.variables)
    if not path.startswith("/") or "$" in path:
        if not wanted.required:
            return ""
        raise ConfigError(
            f"the site binds {wanted.path}, which is no path in this job",
            where=f"site {site.name}",
            found=path if "$" not in path else "a variable that is not set",
            fix="set the variable before you submit, or write a site file of your own without it (dray site show)",
        )
    if facts.home and f"{facts.home}/".startswith(f"{path.rstrip('/')}/"):
        raise ConfigError(
            f"{wanted.path} would bring your home into the container",
            where=f"site {site.name}",
            found=path,
            fix="set the variable to another folder: what is in a home (~/.local, ~/.cache) breaks images",
        )
    return path
