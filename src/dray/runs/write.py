"""Plan a run and write its folder, with everything that a node needs."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import ValidationError

from dray import __version__, render
from dray import facts as probed
from dray.config import accelerate_file, deepspeed_file, sites
from dray.config.data import with_text
from dray.config.load_toml import explained, load, validate
from dray.config.recipe import Recipe
from dray.contract import dataset_name, files, node
from dray.contract.files import write_atomic
from dray.contract.findings import ConfigError
from dray.facts import Facts, to_text
from dray.fitness import variables
from dray.planning import environment, image, trainer_defaults, world
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs import capsule, grace, layers, lookup
from dray.runs.store import (
    Run,
    RunPaths,
    attempts,
    new_id,
    newest_attempt,
    next_attempt,
    of_job,
    require_own,
    run_name,
    write_summary,
)

_LIMIT = 256 << 10  # of a configuration; PyYAML takes seconds for that


def read_recipe(path: Path | None, overrides: Sequence[str] = (), command: Sequence[str] = ()) -> Recipe:
    """The recipe with the command line's overrides; a command alone is a recipe too.

    Relative paths in a recipe start in the recipe's folder; a command on the command line runs in the current folder.
    """
    if path is None:
        table = {"name": recipe_name(PurePosixPath(command[0]).stem), "command": {"argv": [*command]}}
        recipe = validate(Recipe, table, overrides, what="the command's recipe")
    else:
        recipe = load(Recipe, path, overrides)
    beside = path.absolute().parent if path else Path.cwd()
    recipe = _placed(recipe, beside)
    if recipe.accelerate:
        file = beside / recipe.accelerate
        recipe = accelerate_file.completed(recipe, _copied(file, "accelerate's file", recipe), file)
    if (part := recipe.train or recipe.command) and part.deepspeed:
        file = beside / part.deepspeed
        recipe = deepspeed_file.agreed(recipe, _copied(file, "the DeepSpeed file", recipe), file)
    return recipe


def recipe_name(word: str) -> str:
    """A valid recipe name, as close to the word as possible."""
    return re.sub("[^a-z0-9._-]", "-", word.lower()).lstrip("._-")[:63] or "run"


def over(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A run's recipe with the command line's overrides, whose relative paths start in the current folder."""
    table = recipe.model_dump(exclude_unset=True)
    return _placed(validate(Recipe, table, overrides, what="the run's recipe"), Path.cwd())


class Last(NamedTuple):
    """The last attempt of a run, from which the next one is planned by default."""

    plan: Plan
    recipe: Recipe
    """The recipe with the job's original number of nodes."""
    gpus: int
    """GPUs per node."""


def last(run: Path) -> Last:
    """The last attempt; ConfigError without a readable plan, or for another user's run, which would run as you."""
    paths = newest_attempt(require_own(run))
    plan = read(paths)
    seen = probed.parse(files.text(paths.facts, "the run's facts"), where=str(paths.facts))
    # A job that lost a node continues with fewer (min_nodes); the next job gets all nodes again.
    known = [RunPaths(paths.run, number) for number in attempts(paths.run)]
    plans = [read(one) for one in known if one.plan.is_file()]
    sizes = [len(one.world.nodes) for one in plans if one.job == plan.job]
    recipe = plan.recipe.model_copy(update={"nodes": max(sizes)})
    return Last(plan, recipe, seen.gpus_per_node)


def _placed(recipe: Recipe, beside: Path) -> Recipe:
    """The recipe with absolute paths, and the text of row functions."""
    places = recipe.all_places() | ({"command.folder": recipe.command.folder} if recipe.command else {})
    if recipe.layer and recipe.layer.endswith(".sif"):
        places["layer"] = recipe.layer
    datasets = recipe.datasets()
    for key, named in places.items():
        placed = str(beside / named)
        placed = dataset_name.parse(datasets[key]).at(placed) if key in datasets else placed
        recipe = _with(recipe, key.split("."), placed)
    for key, named in recipe.maps().items():
        if "\n" not in named:  # else it is from a plan, which has the text
            file = beside / named.rpartition(":")[0]
            text = with_text(named, _copied(file, f"the file of {key}", recipe), file)
            recipe = _with(recipe, key.split("."), text)
    return recipe


def _with(table: Any, keys: Sequence[str], value: str) -> Any:  # noqa: ANN401  a spec, or a table of specs
    """The table with another value at this path of keys."""
    key, *rest = keys
    if isinstance(table, dict):
        return {**table, key: _with(table[key], rest, value)}
    return table.model_copy(update={key: _with(getattr(table, key), rest, value) if rest else value})


def _copied(path: Path, what: str, recipe: Recipe) -> str:
    """The text of a file for the run folder; another user's recipe may name any of your files."""
    text = files.text(path, what, limit=_LIMIT)
    if recipe.runs.share != "none" and not path.stat().st_mode & 0o044:
        raise ConfigError(
            "your private file would be copied into a run folder that your group can read",
            where=f"{what}: {path}",
            wanted="runs.share = none, or a file that your group may read",
            found=f"mode {path.stat().st_mode & 0o777:o}",
            fix=f"runs.share=none, or chmod g+r {shlex.quote(str(path))}",
        )
    return text


def at_site(facts: Facts, choice: sites.Choice | None = None) -> tuple[Facts, sites.Choice]:
    """The facts, with the values of variables in the site's paths, and the site, given or named by the facts."""
    choice = choice or sites.choose(facts)
    if facts.shell and (facts.login or facts.scheduler != "slurm"):  # in a job, the probe finds them
        facts = facts.model_copy(update={"variables": sites.path_variables(choice.site, facts.shell)})
    return facts, choice


def decide(recipe: Recipe, facts: Facts, choice: sites.Choice, paths: RunPaths, *, exact: bool = False) -> Plan:
    """The plan of this recipe on these facts at this site, with its findings."""
    # The model's activations depend on the chosen variant and precision.
    chosen = trainer_defaults.precision(image.chosen(recipe, choice.site, facts).value, choice.site).value
    hub = environment.hub(facts, PurePosixPath(paths.run.parent))
    files = lookup.files(chosen, facts.model_copy(update={"hf_home": hub}), exact=exact)
    runs = grace.earlier(paths.run.parent, recipe.name)
    seconds, run = grace.slowest(paths.run.parent, runs) or (None, "")
    earlier = paths.attempt > 1 or any(one != paths.run.name for one in runs)
    files = files.model_copy(
        update={
            "layer": layers.look(recipe, choice.site, facts),
            "save_s": seconds,
            "save_run": run,
            "earlier": earlier,
        }
    )
    made = plan(
        recipe, choice.site, facts, files, run_folder=PurePosixPath(paths.run),
        scratch=f"{node.OWN}{os.getuid()}-{secrets.token_hex(16)}",
        attempt=paths.attempt, dray=__version__, site_why=choice.reason,
    )  # fmt: skip
    return made.model_copy(update={"findings": (*made.findings, *variables.warnings(made, facts.shell))})


def write(
    recipe: Recipe, facts: Facts, *, runs: Path, run: str | None = None, secret: str = "", beside: Path | None = None
) -> tuple[Plan, RunPaths]:
    """Plan the run, then write its folder; a refused run leaves no folder.

    With `run`, make the next attempt of that run; else a new run, or the next attempt of the run that this requeued job
    began. `secret` is for nodes without a shared folder; others get a new one. `beside` is the recipe's folder, whose
    code the capsule records.
    """
    return begin(recipe, *at_site(facts), runs=runs, run=run, secret=secret, beside=beside)


def begin(
    recipe: Recipe, facts: Facts, choice: sites.Choice, *, runs: Path, run: str | None = None, secret: str = "",
    beside: Path | None = None,
) -> tuple[Plan, RunPaths]:  # fmt: skip
    """As `write`, at a site that is already chosen."""
    recipe = image.chosen(recipe, choice.site, facts).value
    facts = world.select(recipe, facts)
    decided, paths = _begin(recipe, facts, choice, runs, run_name(run or "") or _requeued(recipe, facts, choice, runs))
    _make_cache(Path(environment.caches(facts, PurePosixPath(paths.run.parent))), decided)
    write_atomic(paths.facts, to_text(facts))
    write_atomic(paths.secret, (secret or secrets.token_hex(32)) + "\n", mode=0o600)
    write_atomic(paths.stop, "")
    for name, text in {**decided.files, **render.engine_files(decided)}.items():
        write_atomic(paths.folder / name, text)
    write_atomic(paths.node_script, render.node_script(decided), mode=0o755)
    if options := render.srun_options(decided):
        write_atomic(paths.srun_options, options)
    write_atomic(paths.plan, decided.model_dump_json(indent=1) + "\n")
    write_summary(paths)
    capsule.begun(paths, decided, beside)
    return decided, paths


def _make_cache(folder: Path, decided: Plan) -> None:
    """Make the cache folder for downloads; refuse another user's, which may exist in a shared folder of runs."""
    if not any(bind.path == str(folder) for bind in decided.binds):
        return
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            "the cache folder belongs to another user",
            where=folder,
            wanted=f"a folder of user {os.geteuid()}",
            found=f"a file or folder of user {found.st_uid}",
            fix="remove it, or set DRAY_RUNS to a folder of your own",
        )


def _begin(recipe: Recipe, facts: Facts, choice: sites.Choice, runs: Path, run: str | None) -> tuple[Plan, RunPaths]:
    name = unnumbered = run or new_id(recipe.name, job=facts.job)
    number = 1
    while True:
        paths = next_attempt(runs / name)
        decided = decide(recipe, facts, choice, paths)
        decided.refuse()
        try:
            paths.create(new=run is None, share=recipe.runs.share)
        except FileExistsError:  # two steps of one job may begin in the same second
            number += 1
            name = run or f"{unnumbered}-{number}"
        else:
            return decided, paths


def _requeued(recipe: Recipe, facts: Facts, choice: sites.Choice, runs: Path) -> str | None:
    """The run that this job began before Slurm requeued it; the job may have runs of other recipes too."""
    for name in of_job(runs, recipe.name, facts.job) if facts.restarts else ():
        # The first plan has the recipe as decided; a later attempt may have had fewer nodes.
        first = next((one.paths for one in Run(runs / name).attempts if one.paths.plan.is_file()), None)
        if first and read(first).recipe == decide(recipe, facts, choice, first).recipe:
            return name
    return None


def read(paths: RunPaths) -> Plan:
    """The plan of an attempt; ConfigError if it is missing, damaged or of another version."""
    text = files.text(paths.plan, "the run's plan")
    plan = files.parse_json(text, "the run's plan", paths.plan)
    found, version = plan.get("version") if isinstance(plan, dict) else None, Plan.model_fields["version"].default
    if found != version:
        raise ConfigError(
            "this run was planned by another version of dray",
            where=paths.plan,
            wanted=f"plan version {version}",
            found=f"plan version {found}",
            fix="use that version of dray, or start an attempt with this one: dray run RECIPE "
            f"--runs={paths.run.parent} --run={paths.run.name}",
        )
    try:
        return Plan.model_validate_json(text)
    except ValidationError as wrong:
        raise ConfigError("the run's plan is damaged", where=paths.plan, found=explained(wrong)) from wrong
