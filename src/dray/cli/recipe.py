"""`dray recipe`: list, write and check recipes."""

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
    beyond: set[str] = set()
    listed = []
    for path in sorted((dray_home.root() / "recipes").glob("*.toml")):
        recipe = read_recipe(path)
        more = {package.module for package in requirements.of(recipe) if not package.demo}
        listed.append({"name": path.stem, "about": recipe.about, "file": str(path), "needs": sorted(more)})
        beyond |= more
    if as_json:
        print(json.dumps(listed, indent=1))
        return
    for one in listed:
        print(f"{str(one['name']) + ' *' * bool(one['needs']):<30} {one['about']}")
    names = " or ".join(sorted(beyond))
    print(f"\n* needs {names}, which only an image has: dray run NAME scale=tiny --engine docker")


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check a recipe's keys, values, batch and paths. What its files contain is checked when it runs.

    dray recipe check recipes/smoke-cpu.toml train.steps=500
    """
    settings = overrides or []
    good = read_recipe(recipe, settings)
    for one in (good, read_recipe(recipe, [*settings, "scale=tiny"])) if good.tiny else (good,):
        if one.batch and one.ranks_per_node:
            divide(one.batch, world_size=one.nodes * one.ranks_per_node)
    missing = local_inputs.missing_paths(good)
    if missing:
        raise ConfigError(
            "files that the recipe names are missing on this machine",
            where=recipe,
            wanted="a file, a folder or a pattern that matches files",
            found="\n".join(f"{key} = {path}" for key, path in missing.items()),
            fix="correct the path, or check the recipe on a machine that has the file",
        )
    print(f"{recipe}: good ({good.name}, {good.launcher} in the {good.image} image)")


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write, such as mine.toml.")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File or folder to train on. Default: the built-in dataset.")
    ] = None,
) -> None:
    """Write a first recipe, which trains a small GPT-2 from scratch in minutes.

    dray recipe new mine.toml --text stories.txt
    """
    if file.suffix != ".toml":
        fix = f"dray recipe new {file}.toml"
        raise ConfigError("a recipe is a TOML file", wanted="a name that ends in .toml", found=file, fix=fix)
    if text and not text.exists():
        raise ConfigError("--text names no existing file or folder", where=text.absolute(), fix="--text FILE")
    content = New(name=recipe_name(file.stem), train=_beside(file, text)).text()
    write(file, content)
    print(f"{content}\n{file} is written. Next: dray run {shlex.quote(str(file))}")


def require_good(content: str) -> None:
    """Refuse the text of a recipe that is not valid."""
    validate(Recipe, tomllib.loads(content), what="the recipe")


def write(file: Path, content: str) -> None:
    """Write a valid recipe as a new file; never replace one."""
    require_good(content)
    try:
        files.write_new(file, content)
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        found = "it exists already" if exists else error.strerror
        fix = (
            "give another name"
            if exists
            else "name a file in a folder to which you may write, on a disk with free space"
        )
        raise ConfigError("cannot write the recipe", where=file, found=found, fix=fix) from error


def _beside(file: Path, text: Path | None) -> str:
    """The dataset as the recipe names it: relative to the recipe's folder if it is inside."""
    if text is None:
        return "builtin"
    place, folder = text.absolute(), file.absolute().parent
    return str(place.relative_to(folder) if place.is_relative_to(folder) else place)


@app.command()
def keys(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]", help="A table or a key, such as train. Default: all.", autocompletion=candidates.key_names
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Print the keys of a recipe, or of one of its tables, each with its type, default and meaning.

    dray recipe keys train
    dray recipe keys checkpoint.every
    """
    show_keys(Recipe, name, as_json=as_json)


def show_keys(model: type[Spec], name: str = "", *, as_json: bool = False) -> None:
    """Print the keys of such a file, or only those of the table or key `name`."""
    described = Schema(model).describe()
    chosen = [entry for entry in described if not name or re.match(rf"{re.escape(name)}(\W|$)", entry[0])]
    if not chosen:
        tops = list(dict.fromkeys(re.split(r"\W", key)[0] for key, *_ in described))
        near = nearest(name, [*tops, *(key for key, *_ in described)])
        fix = f"{model.lists} {near}".rstrip()
        raise ConfigError("there is no such key or table", wanted=listed(tops), found=name, fix=fix)
    if as_json:
        columns = ("key", "type", "default", "about")
        print(json.dumps([dict(zip(columns, entry, strict=True)) for entry in chosen], indent=1, ensure_ascii=False))
        return
    for key, kind, default, doc in chosen:
        print(f"{key}  ({kind}; {default or 'may be left out'})\n    {' '.join(doc.split())}")
