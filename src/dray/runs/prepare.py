"""Read a recipe, look up what its plan needs, and write the run's folder with everything that a node needs."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dray import __version__, engines, render
from dray import facts as probed
from dray.config import accelerate_file, deepspeed_file, dray_home, sites
from dray.config.data import with_text
from dray.config.load_toml import load, put, validate
from dray.config.recipe import Command, Recipe
from dray.config.site import Site
from dray.contract import exit_codes, files, node
from dray.contract.files import write_atomic
from dray.contract.findings import ConfigError, Finding
from dray.contract.trainer import dataset
from dray.facts import Facts, Files, Layer, to_text
from dray.fitness import variables
from dray.images import store
from dray.images.layers import layer_lock
from dray.images.locks import lock
from dray.images.sif import record, verify
from dray.planning import environment, image, world
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs import capsule
from dray.runs.metrics import number
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
    inputs = find_inputs(recipe, facts.model_copy(update={"hf_home": hub}))
    earlier = earlier_runs(runs, recipe.name)
    save_s, save_run = slowest_checkpoint(runs, earlier) or (None, "")
    inputs = inputs.model_copy(
        update={
            "layer": find_layer(recipe, choice.site, facts),
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


# Models, datasets and programs ---------------------------------------------------------------------------------------


def find_inputs(recipe: Recipe, facts: Facts) -> Files:
    """What the plan needs to know of files. A job's planner sees only HF_HOME: the nodes check other paths."""
    if recipe.command:
        in_job = facts.scheduler == "slurm" and not facts.login
        return Files(findings=() if in_job else tuple(_program(recipe.command)))
    cache = Path(recipe.env.get("HF_HOME", facts.hf_home) or "/nonexistent", "hub")
    return Files(
        configuration=_configuration(recipe, cache),
        missing_on_hub=tuple(_missing_on_hub(recipe, cache)),
        missing_paths=missing_paths(recipe) if facts.login else {},
    )


def missing_paths(recipe: Recipe) -> dict[str, str]:
    """The files and folders that the recipe names and this machine does not have, by key."""
    missing = {}
    for key, name in recipe.places().items():
        path = Path(name)
        if not path.exists() and not any(path.parent.glob(path.name)):  # it may be a pattern
            missing[key] = name
    return missing


def _configuration(recipe: Recipe, cache: Path) -> dict[str, Any] | None:
    """The model's config.json, as transformers will read it."""
    model = recipe.model
    try:
        if model.name:
            return {**_model_config(model.name, model.revision, cache), **model.config}
        tokenizer = _model_config(model.tokenizer, model.tokenizer_revision, cache) if model.tokenizer else {}
    except (OSError, ValueError, ConfigError):  # the nodes report what is wrong
        return None
    vocabulary = tokenizer.get("vocab_size", 257)  # without a tokenizer, one for each byte
    return {"model_type": model.type, "vocab_size": vocabulary, **model.config}


def _model_config(name: str, revision: str, cache: Path) -> dict[str, Any]:
    """The config.json of a folder or of the hub's cache."""
    folder = Path(name)
    if not name.startswith(("/", ".")):
        cached = _cached(cache, "models", name)
        ref = cached / "refs" / revision
        folder = cached / "snapshots" / (files.read(ref).decode().strip() if ref.is_file() else revision)
    found = files.parse_json(files.read(folder / "config.json").decode(), "the model", folder)
    return found if isinstance(found, dict) else {}


def _cached(cache: Path, kind: str, name: str) -> Path:
    return cache / f"{kind}--{name.replace('/', '--')}"


def _missing_on_hub(recipe: Recipe, cache: Path) -> Iterator[str]:
    models = [name for name in (recipe.model.name, recipe.model.tokenizer) if name and name[0] not in "/."]
    named = [("models", name) for name in models]
    for name in recipe.datasets().values():
        source = dataset.parse(name)
        if source.builder == dataset.HUB:  # OWNER/NAME[@REVISION][/SUBSET]
            named.append(("datasets", "/".join(source.files.partition("@")[0].split("/")[:2])))
    for kind, name in dict.fromkeys(named):
        if not _cached(cache, kind, name).is_dir():
            yield name


def _program(command: Command) -> Iterator[Finding]:
    """Why the command's own script cannot be started; a program of PATH or of the image is not looked for."""
    word, path = command.argv[0], Path(command.folder, command.argv[0])
    is_script = word.endswith(".py")
    in_image = word.startswith("/") and not path.is_relative_to(command.folder)
    if in_image or ("/" not in word and not is_script):
        return
    if not path.is_file():
        found, fix = f"{path} is not a file", "correct the path; it starts in the current or in the recipe's folder"
    elif not is_script and not os.access(path, os.X_OK):
        found, fix = f"{path} may not be executed", shlex.join(["chmod", "+x", str(path)])
    else:
        return
    yield Finding("the command cannot be started", found=found, fix=fix, code=exit_codes.CONFIG)


# The layer -----------------------------------------------------------------------------------------------------------

_NOBODY = 65534


def ask_for_layer(recipe: Recipe, site: Site, facts: Facts) -> list[str]:
    """The line that asks slurm/plan.sh to bind the layer into the planner's container; empty if that is done.

    A layer is one variant's, and only an adopted image itself tells its variant.
    """
    if facts.layer or not (facts.image_given or image.is_adopted(recipe, facts)):
        return []
    file = _layer_file(recipe, site, facts.model_copy(update={"engine": site.engine or facts.engine}))
    return [f"layer={file}"] if file else []


def find_layer(recipe: Recipe, site: Site, facts: Facts) -> Layer | None:
    """The layer, from its record; None if the recipe names none or the engine cannot bind one."""
    file = _layer_file(recipe, site, facts)
    if not file:
        return None
    variant = image.variant(recipe, site, facts).value
    fix = f"dray image layer {variant} --pip PACKAGE --name {recipe.layer}"
    if not file.is_file():
        raise ConfigError("the layer does not exist", wanted=file, fix=fix)
    if not (files.is_own(file) or _is_hidden(file)):
        owner, build = file.stat(), dray_home.root() / "build"
        raise ConfigError(
            "another user may change the layer, and every rank runs its code",
            where=file,
            wanted="a file of yours or of root's, which not everybody may write",
            found=f"a file of user {owner.st_uid}, mode {owner.st_mode & 0o7777:04o}",
            fix=f"cp {shlex.quote(str(file))}{{,.json}} {shlex.quote(str(build))}/, and name that copy",
        )
    layer, needs = _recorded_layer(file)
    if layer is None or verify.digest(file) != layer.digest:
        raise ConfigError(
            "the layer differs from its record, or has none",
            where=file,
            wanted=f"the digest in {record.path_for(file)}",
            fix=f"copy the layer again with its record, or {fix}",
        )
    return layer.model_copy(update={"changed": tuple(layer_lock.unfit(needs, _image_packages(variant)))})


def made_layer(variant: str, name: str) -> Layer | None:
    """The layer with this name; None if `dray image layer` did not make it here."""
    return _recorded_layer(store.layer(dray_home.root(), variant, name).absolute())[0]


def _recorded_layer(file: Path) -> tuple[Layer | None, dict[str, str]]:
    """The layer as its record tells it, and the packages that it was locked for."""
    known = record.read(file) if file.is_file() else None
    if known is None or not known.python:  # an image's own record names no Python
        return None, {}
    digest = f"sha256:{known.sif.sha256}"
    return Layer(file=str(file), digest=digest, variant=known.variant, packages=known.packages), known.needs


def _is_hidden(file: Path) -> bool:
    """Whether this container shows all other users as nobody; the job's script checked the owner outside."""
    found, users = file.stat(), Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    return found.st_uid == _NOBODY and users[2:] == ["1"] and not found.st_mode & stat.S_IWOTH


def _layer_file(recipe: Recipe, site: Site, facts: Facts) -> Path | None:
    if recipe.layer is None or not engines.get(facts.engine).binds_layers:
        return None
    return store.layer(dray_home.root(), image.variant(recipe, site, facts).value, recipe.layer)


def _image_packages(variant: str) -> dict[str, str]:
    """The image's packages, from the image around this program, or from the checkout's lock."""
    try:
        found = json.loads((Path(sys.prefix) / "image.json").read_text(encoding="utf-8"))["packages"]
        return {re.sub(r"[-_.]+", "-", name).lower(): str(version) for name, version in found.items()}
    except (OSError, ValueError, KeyError):
        pins = lock.read(dray_home.root() / f"containers/{variant}/requirements.lock")
        return {pin.name: pin.version for pin in pins}


# Checkpoints of earlier runs -----------------------------------------------------------------------------------------

_EARLIER_RUNS = 8  # the newest ones


def earlier_runs(runs: Path, name: str) -> list[str]:
    """The runs of this recipe, newest first."""
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(name)}-(\d+|[0-9a-f]{{6}})")
    with suppress(OSError):
        return sorted(filter(pattern.fullmatch, os.listdir(runs)), reverse=True)  # noqa: PTH208
    return []


def slowest_checkpoint(runs: Path, names: Sequence[str]) -> tuple[float, str] | None:
    """Seconds of the slowest checkpoint, and the run's name, from the first of these runs that recorded it."""
    for name in names[:_EARLIER_RUNS]:
        with suppress(OSError):
            run = Run(runs / name)
            saves = [number(attempt.result, "save_s") or 0.0 for attempt in run.attempts]
            if any(saves) and run.owner == os.geteuid():
                return max(saves), name
    return None
