"""`dray recipe`: list, write and check recipes, and print their keys."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import typer

from dray.cli.args import Json, Overrides, RecipeFile
from dray.cli.candidates import recipe_files
from dray.cli.streams import say
from dray.config.describe_keys import Schema
from dray.config.load_toml import Spec, validate
from dray.config.new_recipe import New
from dray.config.recipe import Recipe
from dray.contract import files
from dray.contract.findings import ConfigError, listed, nearest
from dray.planning.world import divide
from dray.runs import prepare
from dray.runs.prepare import read_recipe, recipe_name

app = typer.Typer()


@app.command("list")
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


@app.command()
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


@app.command()
def new(
    file: Path,
    text: Path | None = None,
) -> None:
    """Write a first recipe, which trains a small GPT-2 from scratch in minutes.

    FILE: The recipe to write, such as mine.toml.
    --text FILE: File or folder to train on. Default: the built-in dataset.

    dray recipe new mine.toml --text stories.txt
    """
    if file.suffix != ".toml":
        file = Path(f"{file}.toml")
    content = New(name=recipe_name(file.stem), train=absolute("--text", str(text)) if text else "builtin").text()
    require_good(content)
    write_new(file, content, "the recipe", fix="name a new file, in a folder to which you may write")
    print(f"{content}\n{file} is written. Next: dray run {shlex.quote(str(file))}")


@app.command()
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
