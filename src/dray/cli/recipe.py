"""`dray recipe`: list, write and check recipes, and print their keys."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import candidates
from dray.cli.args import Json, Overrides, RecipeFile
from dray.config import dray_home, requirements
from dray.config.describe_keys import Schema
from dray.config.load_toml import Spec, validate
from dray.config.new_recipe import New
from dray.config.recipe import Recipe
from dray.contract import files
from dray.contract.findings import ConfigError, listed, nearest
from dray.planning.world import divide
from dray.runs import local_inputs
from dray.runs.prepare import read_recipe, recipe_name

app = typer.Typer(no_args_is_help=True, help="List, write and check recipes, and list their keys.")


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Print the recipes that come with dray. `dray run NAME scale=tiny` tries one with a small model and dataset.

    dray recipe list --json
    """
    recipes = []
    needs: set[str] = set()
    for path in sorted((dray_home.root() / "recipes").glob("*.toml")):
        recipe = read_recipe(path)
        more = {package.module for package in requirements.of(recipe) if not package.demo}
        recipes.append({"name": path.stem, "about": recipe.about, "file": str(path), "needs": sorted(more)})
        needs |= more
    if as_json:
        print(json.dumps(recipes, indent=1))
        return
    for entry in recipes:
        mark = " *" if entry["needs"] else ""
        print(f"{entry['name']}{mark}".ljust(30), entry["about"])
    print(f"\n* needs {' or '.join(sorted(needs))}, which only an image has: dray run NAME scale=tiny --engine docker")


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
    if missing := local_inputs.missing_paths(checked):
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
        raise ConfigError("a recipe is a TOML file", found=file, fix=f"dray recipe new {file}.toml")
    dataset = "builtin"
    if text:
        path, folder = text.absolute(), file.absolute().parent
        if not path.exists():
            raise ConfigError("--text names no existing file or folder", where=path, fix="--text FILE")
        dataset = str(path.relative_to(folder) if path.is_relative_to(folder) else path)
    content = New(name=recipe_name(file.stem), train=dataset).text()
    write(file, content)
    print(f"{content}\n{file} is written. Next: dray run {shlex.quote(str(file))}")


@app.command()
def keys(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="A table or a key, such as train. Default: all.", autocompletion=candidates.key_names
        ),
    ] = "",
) -> None:
    """Print the keys of a recipe, or of one of its tables, each with its type, default and meaning.

    dray recipe keys train
    dray recipe keys checkpoint.every
    """
    show_keys(Recipe, name)


def require_good(content: str) -> None:
    """Refuse the text of a recipe that is not valid."""
    validate(Recipe, tomllib.loads(content), what="the recipe")


def write(file: Path, content: str) -> None:
    """Write a valid recipe as a new file; never replace one."""
    require_good(content)
    write_new(file, content, "the recipe", fix="give another name")


def write_new(file: Path, content: str, what: str, *, fix: str) -> None:
    """Write a new file; ConfigError with the fix if it exists."""
    try:
        files.write_new(file, content)
    except FileExistsError as error:
        raise ConfigError(f"cannot write {what}", where=file, found="it exists already", fix=fix) from error
    except OSError as error:
        fix = "name a file in a folder to which you may write, on a disk with free space"
        raise ConfigError(f"cannot write {what}", where=file, found=error.strerror, fix=fix) from error


def show_keys(model: type[Spec], name: str) -> None:
    """Print the keys of such a file, or only those of the table or key `name`."""
    described = Schema(model).describe()
    chosen = [entry for entry in described if not name or re.match(rf"{re.escape(name)}(\W|$)", entry[0])]
    if not chosen:
        tables = list(dict.fromkeys(re.split(r"\W", key)[0] for key, *_ in described))
        fix = f"{model.lists} {nearest(name, [*tables, *(key for key, *_ in described)])}"
        raise ConfigError("there is no such key or table", wanted=listed(tables), found=name, fix=fix.rstrip())
    for key, kind, default, about in chosen:
        print(f"{key}  ({kind}; {default or 'may be left out'})\n    {' '.join(about.split())}")
