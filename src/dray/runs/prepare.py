"""Read a recipe, plan its run, and write the run's folder with everything that a node needs."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dray import __version__, render
from dray import facts as probed
from dray.config import accelerate_file, deepspeed_file, sites
from dray.config.data import with_text
from dray.config.load_toml import load, put, validate
from dray.config.recipe import Recipe
from dray.contract import files, node
from dray.contract.files import write_atomic
from dray.contract.findings import ConfigError
from dray.contract.trainer import dataset
from dray.facts import Facts, to_text
from dray.fitness import variables
from dray.planning import environment, image, world
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs import capsule, checkpoint_times, find_inputs, image_layer
from dray.runs.store import (
    Run,
    RunPaths,
    dig,
    new_id,
    newest_attempt,
    next_attempt,
    of_job,
    plan_of,
    require_own,
    run_name,
)  # fmt: skip

_LARGEST_FILE = 256 << 10  # of a configuration; PyYAML takes seconds for that


def read_recipe(path: Path | None, overrides: Sequence[str] = (), command: Sequence[str] = ()) -> Recipe:
    """The recipe with the command line's overrides; a command alone is a recipe too.

    Relative paths in a recipe start in the recipe's folder; a command on the command line runs in the current folder.
    """
    if path:
        folder, recipe = path.absolute().parent, load(Recipe, path, overrides)
    else:
        table = {"name": recipe_name(PurePosixPath(command[0]).stem), "command": {"argv": [*command]}}
        folder, recipe = Path.cwd(), validate(Recipe, table, overrides, what="the command's recipe")
    recipe = _with_files(recipe, folder)
    if recipe.accelerate:
        file = folder / recipe.accelerate
        recipe = accelerate_file.completed(recipe, _copied(file, "accelerate's file", recipe), file)
    program = recipe.train or recipe.command
    if program and program.deepspeed:
        file = folder / program.deepspeed
        recipe = deepspeed_file.agreed(recipe, _copied(file, "the DeepSpeed file", recipe), file)
    return recipe


def recipe_name(word: str) -> str:
    """A valid recipe name, as close to the word as possible."""
    return re.sub("[^a-z0-9._-]", "-", word.lower()).lstrip("._-")[:63] or "run"


def over(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A run's recipe with the command line's overrides, whose relative paths start in the current folder."""
    table = recipe.model_dump(exclude_unset=True)
    return _with_files(validate(Recipe, table, overrides, what="the run's recipe"), Path.cwd())


def _with_files(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with absolute paths, and the text of row functions; relative paths start in the folder."""
    table = recipe.model_dump(exclude_unset=True)
    places = recipe.all_places()
    if recipe.command:
        places["command.folder"] = recipe.command.folder
    if recipe.layer and recipe.layer.endswith(".sif"):
        places["layer"] = recipe.layer
    datasets = recipe.datasets()
    for key, place in places.items():
        absolute = str(folder / place)
        value = dataset.parse(datasets[key]).at(absolute) if key in datasets else absolute
        table = put(table, tuple(key.split(".")), value)
    for key, function in recipe.maps().items():
        if "\n" not in function:  # else it is from a plan, which has the text
            file = folder / function.rpartition(":")[0]
            table = put(
                table, tuple(key.split(".")), with_text(function, _copied(file, f"the file of {key}", recipe), file)
            )
    return validate(Recipe, table, what="the recipe")


def _copied(path: Path, what: str, recipe: Recipe) -> str:
    """The text of a file for the run folder; another user's recipe may name any of your files."""
    text = files.text(path, what, limit=_LARGEST_FILE)
    if recipe.runs.share != "none" and not path.stat().st_mode & 0o044:
        raise ConfigError(
            "your private file would be copied into a run folder that your group can read",
            where=f"{what}: {path}",
            fix=f"runs.share=none, or chmod g+r {shlex.quote(str(path))}",
        )
    return text


class Last(NamedTuple):
    """The last attempt of a run, from which the next one is planned by default."""

    plan: Plan
    recipe: Recipe
    """The recipe with the job's original number of nodes."""
    gpus: int
    """GPUs per node."""
    image: str
    """The image's file, if the user named it."""


def last(run: Path) -> Last:
    """The last attempt; ConfigError without a readable plan, or for another user's run, which would run as you."""
    paths = newest_attempt(require_own(run))
    plan = plan_of(paths)
    seen = probed.parse(files.text(paths.facts, "the run's facts"), where=str(paths.facts))
    # A job that lost a node continues with fewer (min_nodes); the next job gets all nodes again.
    nodes = [len(plan.world.nodes)]
    for attempt in Run(paths.run).attempts:
        if plan.job and attempt.job == plan.job:
            nodes.append(len(dig(attempt.plan, "world", "nodes") or ()))
    recipe = plan.recipe.model_copy(update={"nodes": max(nodes)})
    return Last(plan, recipe, seen.gpus_per_node, plan.image if seen.image_given else "")


def at_site(facts: Facts, choice: sites.Choice | None = None) -> tuple[Facts, sites.Choice]:
    """The facts, with the values of variables in the site's paths, and the site, given or named by the facts."""
    choice = choice or sites.choose(facts)
    if facts.shell and (facts.login or facts.scheduler != "slurm"):  # in a job, the probe finds them
        facts = facts.model_copy(update={"variables": sites.path_variables(choice.site, facts.shell)})
    return facts, choice


def decide(recipe: Recipe, facts: Facts, choice: sites.Choice, paths: RunPaths) -> Plan:
    """The plan of this recipe on these facts at this site, with its findings."""
    runs = paths.run.parent
    hub = environment.hub(facts, PurePosixPath(runs))
    inputs = find_inputs.files(recipe, facts.model_copy(update={"hf_home": hub}))
    earlier = checkpoint_times.earlier(runs, recipe.name)
    save_s, save_run = checkpoint_times.slowest(runs, earlier) or (None, "")
    inputs = inputs.model_copy(
        update={
            "layer": image_layer.look(recipe, choice.site, facts),
            "save_s": save_s,
            "save_run": save_run,
            "earlier": paths.attempt > 1 or any(run != paths.run.name for run in earlier),
        }
    )
    decided = plan(
        recipe, choice.site, facts, inputs, run_folder=PurePosixPath(paths.run),
        scratch=f"{node.OWN}{os.getuid()}-{secrets.token_hex(16)}",
        attempt=paths.attempt, dray=__version__, site_why=choice.reason,
    )  # fmt: skip
    return decided.model_copy(update={"findings": (*decided.findings, *variables.warnings(decided, facts.shell))})


def write(
    recipe: Recipe, facts: Facts, *, runs: Path, run: str | None = None, choice: sites.Choice | None = None,
    secret: str = "", beside: Path | None = None,
) -> tuple[Plan, RunPaths]:  # fmt: skip
    """Plan the run, then write its folder; a refused run leaves no folder.

    With `run`, make the next attempt of that run; else a new run, or the next attempt of the run that this requeued job
    began. `choice` is the site, if it is known. `secret` is for nodes without a shared folder; others get a new one.
    `beside` is the recipe's folder, whose code the capsule records.
    """
    facts, choice = at_site(facts, choice)
    recipe = image.chosen(recipe, choice.site, facts).value
    facts = world.select(recipe, facts)
    run = run_name(run or "") or _requeued(recipe, facts, choice, runs)
    name = new_name = run or new_id(recipe.name, job=facts.job)
    number = 1
    while True:
        paths = next_attempt(runs / name)
        decided = decide(recipe, facts, choice, paths)
        decided.refuse()
        try:
            paths.create(new=run is None, share=recipe.runs.share)
            break
        except FileExistsError:  # two steps of one job may begin in the same second
            number += 1
            name = run or f"{new_name}-{number}"
    cache = str(environment.caches(facts, PurePosixPath(runs)))
    if any(bind.path == cache for bind in decided.binds):
        _make_cache(Path(cache))
    write_atomic(paths.facts, to_text(facts))
    write_atomic(paths.secret, (secret or secrets.token_hex(32)) + "\n", mode=0o600)
    write_atomic(paths.stop, "")
    for name, text in {**decided.files, **render.engine_files(decided)}.items():
        write_atomic(paths.folder / name, text)
    write_atomic(paths.node_script, render.node_script(decided), mode=0o755)
    if options := render.srun_options(decided):
        write_atomic(paths.srun_options, options)
    write_atomic(paths.plan, decided.model_dump_json(indent=1) + "\n")
    capsule.begun(paths, decided, beside)
    return decided, paths


def _requeued(recipe: Recipe, facts: Facts, choice: sites.Choice, runs: Path) -> str | None:
    """The run that this job began before Slurm requeued it; the job may have runs of other recipes too."""
    for name in of_job(runs, recipe.name, facts.job) if facts.restarts else ():
        # The first plan has the recipe as decided; a later attempt may have had fewer nodes.
        planned = [attempt.paths for attempt in Run(runs / name).attempts if attempt.paths.plan.is_file()]
        if planned and plan_of(planned[0]).recipe == decide(recipe, facts, choice, planned[0]).recipe:
            return name
    return None


def _make_cache(folder: Path) -> None:
    """Make the cache folder for downloads; refuse another user's, which may exist in a shared folder of runs."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if why := files.open_to_others(folder, folder=True):
        raise ConfigError(
            "another user may write the cache folder",
            where=folder,
            found=why,
            fix=f"chmod go-w {shlex.quote(str(folder))}; if it is not yours, set DRAY_RUNS to a folder of your own",
        )
