"""Recipes and their datasets: list, check, write and show them; and `dray init`, a folder with a first recipe."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from dray import process
from dray.cli.args import Engine, Json, Overrides, RecipeFile, program, recipe_files
from dray.cli.streams import say
from dray.config import dray_home, sites
from dray.config.describe_keys import Schema
from dray.config.image_definition import ACCELERATORS
from dray.config.load_toml import Spec, validate
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import exit_codes, files, node
from dray.contract.control_characters import cell, printable
from dray.contract.findings import ConfigError, counted, listed, nearest
from dray.images import store
from dray.planning.world import divide
from dray.runs import prepare, slurm
from dray.runs.prepare import read_recipe, recipe_name

recipe_verbs = typer.Typer()
data_verbs = typer.Typer()


@recipe_verbs.command("list")
def list_(as_json: Json = False) -> None:
    """Print the recipes that come with dray. `dray run NAME scale=tiny` tries one with a small model and dataset.

    dray recipe list --json
    """
    recipes = []
    for name, path in recipe_files().items():
        try:
            recipes.append({"name": name, "about": read_recipe(path).about, "file": str(path)})
        except ConfigError as wrong:
            say(f"dray: warning: not listed: {wrong}")
    if as_json:
        print(json.dumps(recipes, indent=1))
        return
    for entry in recipes:
        print(f"{entry['name']:<30} {entry['about']}")


@recipe_verbs.command()
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check a recipe's keys, values, batch and paths. What its files contain is checked when it runs.

    dray recipe check recipes/smoke-cpu.toml train.steps=500
    """
    checked = read_recipe(recipe, overrides or [])
    scales = [checked]
    if checked.tiny:
        scales.append(read_recipe(recipe, [*(overrides or []), "scale=tiny"]))
    for scale in scales:
        if scale.batch and scale.ranks_per_node:
            divide(scale.batch, world_size=scale.nodes * scale.ranks_per_node)
    if missing := prepare.missing_paths(checked):
        raise ConfigError(
            "files that the recipe names are missing on this machine",
            where=recipe,
            wanted="a file, a folder or a pattern that matches files",
            found="\n".join(f"{key} = {path}" for key, path in missing.items()),
            fix="correct the path, or check the recipe on a machine that has the file",
        )
    print(f"{recipe}: good ({checked.name}, {checked.launcher} in the {checked.image} image)")


@recipe_verbs.command()
def new(
    file: Path,
    text: Path | None = None,
) -> None:
    """Write a first recipe, which trains a small GPT-2 from scratch in minutes.

    FILE: The recipe to write, such as mine.toml.
    --text FILE: File or folder to train on. Default: the built-in dataset.

    dray recipe new mine.toml --text stories.txt
    """
    from dray.config.new_recipe import New

    if file.suffix != ".toml":
        file = Path(f"{file}.toml")
    content = New(name=recipe_name(file.stem), train=absolute("--text", str(text)) if text else "builtin").text()
    require_good(content)
    write_new(file, content, "the recipe", fix="name a new file, in a folder to which you may write")
    print(f"{content}\n{file} is written. Next: dray run {shlex.quote(str(file))}")


@recipe_verbs.command()
def keys(
    key: str = "",
) -> None:
    """Print the keys of a recipe, or of one of its tables, each with its type, default and meaning.

    KEY: A table or a key, such as train. Default: all.

    dray recipe keys train
    dray recipe keys checkpoint.every
    """
    show_keys(Recipe, key)


def absolute(option: str, given: str) -> str:
    """The absolute path of a file, a folder or a pattern, since the recipe may move."""
    path = Path(given).expanduser().absolute()
    if not path.exists() and not any(path.parent.glob(path.name)):
        raise ConfigError(f"{option} names nothing", where=path, fix=f"leave out {option}")
    return str(path)


def require_good(content: str) -> None:
    """Refuse the text of a recipe that is not valid."""
    validate(Recipe, tomllib.loads(content), what="the recipe")


def write_new(file: Path, content: str, what: str, *, fix: str) -> None:
    """Write a new file; ConfigError with the fix if it cannot be written, or exists."""
    try:
        files.write_new(file, content)
    except OSError as error:
        raise ConfigError(f"cannot write {what}", where=file, found=error.strerror, fix=fix) from error


def show_keys(model: type[Spec], name: str) -> None:
    """Print the keys of such a file, or only those of the table or key `name`."""
    described = Schema(model).describe()
    chosen = [entry for entry in described if re.match(rf"{re.escape(name)}(\W|$)", entry[0])] if name else described
    if not chosen:
        names = [key for key, *_ in described]
        tables = list(dict.fromkeys(re.split(r"\W", key)[0] for key in names))
        fix = f"{model.lists} {nearest(name, [*tables, *names])}"
        raise ConfigError("there is no such key or table", wanted=listed(tables), found=name, fix=fix.rstrip())
    for key, kind, default, about in chosen:
        print(f"{key}  ({kind}; {default or 'may be left out'})\n    {' '.join(about.split())}")


_GPUS = (
    "cuda: NVIDIA A100 and newer; cuda12: NVIDIA V100, or an older driver; rocm: AMD; "
    "rocm6: AMD, with an older driver; cpu: none"
)
# What Slurm calls a GPU in GRES, gpu:v100:4.
_OLD, _AMD = re.compile("v100|p100|gtx|rtx20", re.IGNORECASE), re.compile(r"mi\d|amd|radeon", re.IGNORECASE)
_RECIPE = Path("recipes", "mine.toml")


def init(
    folder: Path = Path(),
    gpu: str = "",
    model: str = "",
    data: str = "builtin",
) -> None:
    """Write a folder from which you build images and submit jobs, with a first recipe, and print the next commands.

    It takes the partition, the account and the GPUs from Slurm and this machine, and overwrites no file.

    FOLDER: A new or empty folder, or a checkout of dray.
    --gpu VARIANT: Image variant: cuda, cuda12, rocm, rocm6 or cpu. Default: by the names of the GPUs.
    --model MODEL: A model of the hub, or a folder. Default: a GPT-2 of 1 M parameters from scratch.
    --data DATASET: A file, a folder, hub:OWNER/NAME, or builtin: a made-up language.

    dray init my-runs
    dray init my-runs --model gpt2 --data ~/corpus
    """
    from dray.config.new_recipe import New
    from dray.fitness import network_and_site

    chosen = network_and_site.site()
    found = chosen.site
    queue = _partition(found) if process.which("sbatch") else None
    variant = gpu or found.image or _variant(queue)
    if variant not in ACCELERATORS:
        raise ConfigError("there is no image for such a GPU", wanted=_GPUS, found=variant, fix="--gpu cuda")
    gpus = 0 if variant == "cpu" else (queue and queue.gpus) or found.gpus_per_node or 1
    data = data if data == "builtin" or re.match("[a-z0-9]{2,}:", data) else absolute("--data", data)
    if model and (model.startswith(("/", "~", ".")) or Path(model).is_dir()):
        model = absolute("--model", model)
    text = New(name="mine", train=data, image=variant, gpus=gpus, model=model).text()
    require_good(text)  # before the checkout is written
    if not (folder / "containers/steps").is_dir():
        dray_home.write(folder)
    write_new(folder / _RECIPE, text, "the recipe", fix="dray init ANOTHER-FOLDER, or remove this file")
    print(f"site: {found.name} ({chosen.reason})")
    print(f"{folder}: containers/ to build, slurm/ to submit, recipes/ to train\n{folder / _RECIPE}:\n\n{text}")
    commands = []
    if data.startswith("hub:") or (model and not model.startswith("/")):
        commands.append(["data", "prefetch", str(_RECIPE)])
    account = ""
    if queue:
        accounts = slurm.offered("account")
        if found.account or len(accounts) > 1:
            account = [*accounts, found.account][0]
        commands += _slurm_commands(variant, gpus, found, {"--partition": queue.name, "--account": account})
    else:
        commands += _local_commands(variant)
    _print_next(folder, commands)
    if queue and found.name == sites.GENERIC:
        print("No site file knows this cluster: `dray site new` writes one, with its binds and its network.")
    if account and account == found.account:
        print(f"{account} is the site's example: put your own account there.")


def _partition(site: Site) -> slurm.Partition:
    """The site's partition, else the one with most GPUs on a node."""
    partitions = {partition.name: partition for partition in slurm.partitions()}
    for option in site.sbatch:
        if option.startswith("--partition="):
            name = option.partition("=")[2]
            return partitions.get(name, slurm.Partition(name=name, nodes=1, cpus=0, gres=""))
    none = slurm.Partition(name="", nodes=1, cpus=0, gres="")
    return max(partitions.values(), key=lambda partition: (partition.gpus, partition.nodes), default=none)


def _variant(queue: slurm.Partition | None) -> str:
    """The image for the partition's GPUs by Slurm's names of them; without Slurm, for this machine's."""
    if not queue:
        return next((variant for variant in ("cuda", "rocm") if node.has_gpu(ACCELERATORS[variant])), "cpu")
    if not queue.gpus:
        return "cpu"
    if _AMD.search(queue.gres):
        return "rocm"
    return "cuda12" if _OLD.search(queue.gres) else "cuda"


def _slurm_commands(variant: str, gpus: int, site: Site, options: Mapping[str, str]) -> list[list[str]]:
    """The commands on a cluster; of these options of sbatch those that the site does not add itself."""
    argv = ["submit", str(_RECIPE), "--nodes", "1"]
    if gpus:
        argv += ["--gpus-per-node", str(gpus)]
    for option, value in options.items():
        if value and f"{option}={value}" not in site.sbatch:
            argv.append(f"--sbatch={option}={value}")
    engine = site.engine or "apptainer"
    absent = store.absent(store.job_file(dray_home.root(), variant, engine), variant, engine)
    return [*([["image", "build", variant]] if absent else []), [*argv, "--dry-run"], argv]


def _local_commands(variant: str) -> list[list[str]]:
    """The commands without Slurm: run on this machine, in this Python or in Docker."""
    plan, run = ["plan", str(_RECIPE)], ["run", str(_RECIPE)]
    if variant == "cpu" and find_spec("torch"):
        return [plan, run]
    return [["image", "build", variant, "--format", "docker"], plan, [*run, "--engine", "docker"]]


def _print_next(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """Print the commands to type next, complete."""
    dray, *rest = program()
    print("Next:")
    if folder.resolve() != Path().resolve():
        print(f"  cd {shlex.quote(str(folder))}")
        dray = str(Path(dray).absolute()) if "/" in dray else dray
    if Path(sys.prefix).parent.name.startswith("archive-v"):  # of uvx, which leaves no `dray` to call
        print("  make install")
        dray, rest = ".venv/bin/dray", []
    for argv in commands:
        print(f"  {shlex.join([dray, *rest, *argv])}")


Table = dict[str, Any]
_WIDTH = 400  # characters of a part that are shown


@data_verbs.command()
def inspect(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Number of samples to show, from the first on.")] = 2,
    engine: Engine = "bare",
    as_json: Json = False,
) -> None:
    """Print what a run will read: datasets, tokens, lengths, and the first samples with the tokens to predict.

    It tokenizes as a run does, and a later run uses the tokens. --json prints all token ids and labels.

    dray data inspect recipes/smoke-cpu.toml --rows 2
    """
    from dray.contract.trainer import image_tasks
    from dray.runs import local

    settings = read_recipe(recipe, overrides or [])
    if not settings.train:
        raise ConfigError(
            "the data of a [command] cannot be inspected: only its program knows them",
            where=recipe,
            wanted="a recipe with [train]",
            fix="dray recipe new mine.toml writes a recipe for dray's trainer",
        )
    with TemporaryDirectory(prefix="dray-") as folder:
        report = Path(folder, "report.json")
        job = image_tasks.Inspect(settings.model_dump(mode="json"), rows, str(report))
        with redirect_stdout(sys.stderr):  # what the trainer prints
            code = local.run_in_image(
                settings, job, engine=engine, folder=Path(folder), sections=("data", "model", "evaluate")
            )
        if code:
            raise typer.Exit(code)
        found = printable(json.loads(report.read_text(encoding="utf-8")))
    if as_json:
        print(json.dumps(found))
    else:
        show_data(found)


@data_verbs.command()
def prefetch(recipe: RecipeFile, overrides: Overrides = None, engine: Engine = "bare") -> int:
    """Download a recipe's model, tokenizer and datasets into HF_HOME, on a machine with network; runs are offline.

    dray data prefetch recipes/gpt2-wikitext-ddp.toml
    """
    from dray.contract.trainer import image_tasks
    from dray.runs import local

    settings = read_recipe(recipe, overrides or [])
    of_hub = [name for name in settings.datasets().values() if name.startswith("hub:")]
    of_hub += [name for name in (settings.model.name, settings.model.tokenizer) if name and name[0] not in "/."]
    if not of_hub:
        print(f"{recipe}: names nothing of the hub; there is nothing to fetch")
        return exit_codes.DONE
    given = os.environ.get("HF_HOME", "")
    if given and not given.startswith("/"):
        raise ConfigError(
            "HF_HOME is not an absolute path", wanted="a folder that all nodes share", found=f"HF_HOME = {given!r}",
            fix="export HF_HOME=/a/shared/folder, here and where you submit",
        )  # fmt: skip
    home = Path(given or local.hub_cache())
    home.mkdir(parents=True, exist_ok=True)
    if not given:
        print(f"HF_HOME is not set: fetching into {home}, which all nodes must see")
    settings = settings.model_copy(update={"pass_env": tuple({*settings.pass_env, *local.hub_variables()})})
    job = image_tasks.Prefetch(**settings.model_dump(mode="json", include={"data", "model", "evaluate"}))
    return local.run_in_image(settings, job, engine=engine, folder=Path.cwd(), env={"HF_HUB_OFFLINE": "0"})


def show_data(found: Table) -> None:
    """Print the report for a reader."""
    print(f"{found['name']}: {found['objective']}, tokenizer {found['tokenizer']}")
    _show_figures(found)
    for dataset in found["training"] + found["evaluation"]:
        part = " (its last documents, for evaluation)" if dataset.get("held_out") else ""
        print(f"\n{dataset['key']} = {cell(dataset['dataset'])}{part}")
        _show_figures(dataset)
        if "tokens" not in dataset:
            print("  a stream: its tokens are not counted")
    for row in found["rows"]:
        source = f" of {row['source']}" if row["source"] else ""
        predicted = sum(part["tokens"] for part in row["parts"] if part["kind"] in ("predicted", "masked"))
        print(f"\nsample {row['sample']}{source}: {counted(len(row['input_ids']), 'token')}, {predicted:,} predicted")
        document = row["parts"][0]["document"]
        for part in row["parts"]:
            if part["document"] != document:
                document = part["document"]
                print("  -- attention ends here: next document")
            answer = f"  for {part['label']!r}" if part["kind"] == "masked" else ""
            # Escaped: a dataset may have control characters.
            print(f"  {part['kind']:<9}  {part['text'][:_WIDTH]!r}{answer}")


def _show_figures(table: Table) -> None:
    """A line for each number, and for each number in a table."""
    for name, value in table.items():
        figures = value if isinstance(value, dict) else {"": value}
        for inner, figure in figures.items():
            if isinstance(figure, int | float) and not isinstance(figure, bool):
                number = f"{figure:,}" if isinstance(figure, int) else f"{figure:.4g}"
                print(f"  {f'{name} {inner}'.replace('_', ' '):<28}{number}")
