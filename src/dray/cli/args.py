"""The arguments that several verbs take, and what a shell may complete in them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dray import process
from dray.config import dray_home
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError

if TYPE_CHECKING:
    from dray.config.recipe import Recipe
    from dray.planning.schema import Plan
    from dray.runs import prepare

# A name with other characters is not offered: a shell would have to quote it.
_PLAIN = re.compile(r"[\w.,+@%:/~=-]+")
Completer = Callable[[typer.Context, list[str], str], list[str]]


def _quiet(find: Callable[[typer.Context, str], Iterable[str]]) -> Completer:
    """What cannot be read completes nothing."""

    def complete(context: typer.Context, _args: list[str], incomplete: str) -> list[str]:
        try:
            found = sorted(set(find(context, incomplete)))
        except (DrayError, OSError):
            return []
        return [word for word in found if word.startswith(incomplete) and _PLAIN.fullmatch(word)]

    return complete


@_quiet
def complete_runs(context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of runs."""
    from dray.runs import store

    return [run.name for run in store.newest_first(Path(context.params.get("runs") or store.default_runs()))]


@_quiet
def complete_sites(_context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of sites."""
    from dray.config import sites

    return sites.files()


@_quiet
def complete_remotes(_context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of remotes."""
    from dray.remote import remotes_file

    return remotes_file.read()


@_quiet
def complete_recipes(_context: typer.Context, _incomplete: str) -> Iterable[str]:
    """The names of the recipes that come with dray; the shell itself completes files."""
    return recipe_files()


@_quiet
def complete_keys(_context: typer.Context, incomplete: str) -> Iterable[str]:
    """Each key of a recipe with its =; after the =, the key's values if they are few."""
    from dray.config.describe_keys import Schema
    from dray.config.recipe import Recipe

    kinds = {key: kind for key, kind, *_ in Schema(Recipe).describe() if "[]" not in key and ".NAME" not in key}
    name, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{key}." if kind.startswith("a table") else f"{key}=" for key, kind in kinds.items()]
    return [f"{name}={value}" for value in re.findall(r'(?<=")[\w.-]+(?=")|true|false', kinds.get(name, ""))]


def complete_recipe_or_key(context: typer.Context, args: list[str], incomplete: str) -> list[str]:
    """The recipe comes first, and settings after it."""
    begun = context.params.get("arguments") or "=" in incomplete
    return (complete_keys if begun else complete_recipes)(context, args, incomplete)


def recipe_files() -> dict[str, Path]:
    """The recipes that come with dray, by name. Other TOML may be beside them in a user's own checkout."""
    from dray.config import dray_home

    folder = dray_home.root() / "recipes"
    paths = [*sorted(folder.glob("*.toml")), *sorted(folder.glob("*/*.toml"))]
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


def found(path: Path) -> Path:
    """A recipe's file: a path from here or from the checkout, or a NAME that `dray recipe list` prints.

    If there is none, the path that the user probably meant: reading it makes the refusal.
    """
    ours = dray_home.root()
    by_name = ours / "recipes" / f"{path}.toml"
    for file in (path, ours / path, by_name):
        if os.path.isfile(file):  # noqa: PTH113  False for what cannot be a name, too
            return file
    if not path.suffix and len(path.parts) == 1:
        return by_name
    return path if os.path.isdir(path.parent) else ours / path  # noqa: PTH112  likewise


def site_file(name: str) -> str:
    """The name of a site, or the absolute path of its file: a job has another working directory."""
    return str(Path(name).absolute()) if name.endswith(".toml") else name


def named(run: str) -> str:
    """Refuse an empty name: a script's variable may be empty, and the newest run would be stopped or pushed."""
    if not run:
        raise ConfigError("no run is named", wanted="a run's folder, name or job number", found="an empty argument")
    return run


Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE KEY=VALUE -- COMMAND",
        help="A recipe, and settings that override it; or, after --, a command that runs on every rank instead.",
        autocompletion=complete_recipe_or_key,
    ),
]
RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or a name that `dray recipe list` prints.",
        callback=found,
        autocompletion=complete_recipes,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that override the recipe's.", autocompletion=complete_keys),
]
Engine = Annotated[
    Literal["bare", "docker", "podman", "apptainer", "singularity"],
    typer.Option(help="Container engine; bare: this Python, without an image."),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", "-N", min=1, max=65_536, metavar="N", help="Number of nodes. Default: the recipe's."),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        min=1,
        max=1024,
        metavar="N",
        help="Ranks per node, as torchrun's --nproc-per-node; with GPUs, one GPU for each. Default: the recipe's.",
    ),
]
GpusPerNode = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        show_default=False,
        help="GPUs per node, one rank for each. Default: as --ranks; in a job without it the site's.",
    ),
]
GpuMemory = Annotated[
    float | None,
    typer.Option(min=0, metavar="GB", help="Memory of one GPU. Default: the site's. 0: refuse no model for its size."),
]
Site = Annotated[
    str,
    typer.Option(
        envvar="DRAY_SITE",
        metavar="NAME|FILE",
        callback=site_file,
        help="A site's name or file. Default: the site whose file names this cluster.",
        autocompletion=complete_sites,
    ),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        metavar="OPTION",
        help="One more option for sbatch, such as --sbatch=--time=08:00:00; may be repeated.",
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run: its folder, its name or the beginning of it, or a job number (42 or 42_3). Default: the newest.",
        autocompletion=complete_runs,
    ),
]
NamedRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run: its folder, its name or the beginning of it, or a job number.",
        callback=named,
        autocompletion=complete_runs,
    ),
]
RunName = Annotated[
    str,
    typer.Option(
        "--run",
        metavar="NAME|FOLDER",
        help="Name or folder of the run; if it exists, start its next attempt.",
        autocompletion=complete_runs,
    ),
]
Here = Annotated[bool, typer.Option("--local", help="Inside an salloc: use only this machine.")]
Runs = Annotated[
    Path | None,
    typer.Option(envvar="DRAY_RUNS", metavar="FOLDER", help="Folder with the run folders. Default: ./runs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="REMOTE",
        help="Do this at a remote cluster, named by dray remote add.",
        autocompletion=complete_remotes,
    ),
]


def program() -> list[str]:
    """The argv with which the user called dray."""
    path = sys.argv[0]
    name = Path(path).name
    if process.which(name) == path:
        return [name]
    return [sys.executable, "-m", "dray"] if name.endswith(".py") else [path]


def typed(context: typer.Context, name: str) -> bool:
    """Whether the user typed this option: a variable such as DRAY_RUNS holds on this machine, not at a remote."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def age(option: str, text: str) -> float:
    """The typed age in seconds."""
    found = re.fullmatch(r"([0-9]{1,5})([mhdw])", text)
    if not found:
        raise ConfigError(f"{option} has a wrong value", wanted="an age: 90m, 12h, 3d or 2w", found=ascii(text))
    return int(found[1]) * _SECONDS[found[2]]


@dataclass(frozen=True)
class Chosen:
    """What to run, as the user asked for it."""

    path: Path | None
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    last: prepare.Last | None = None
    """The last attempt of an existing run, if neither a recipe nor a command was given."""
    gpus: int = 0
    """The GPUs of a node in the last attempt; 0 if --ranks was given."""

    @property
    def beside(self) -> Path:
        """The folder of the recipe; for a command the working folder."""
        if self.last:
            return dray_home.root()
        return self.path.absolute().parent if self.path else Path.cwd()

    @property
    def image(self) -> str:
        """The image file that was named for the last attempt (DRAY_IMAGE, --image); empty for dray's own image."""
        names_image = any(override.startswith(("image=", "adopted=")) for override in self.overrides)
        return "" if not self.last or names_image else self.last.image

    def say(self, options: Sequence[str] = ()) -> None:
        """Print which run is resumed, and with which settings and options of sbatch."""
        if self.last:
            plan, recipe = self.last.plan, self.last.recipe
            program = recipe.command.argv if recipe.command else ("recipe", recipe.name)
            line = f"resumes {plan.run} by the plan of attempt {plan.attempt}: {shlex.join(program)}"
            if more := shlex.join([*self.overrides, *options]):
                line += f"; with {more}"
            print(printable(line), file=sys.stderr)

    def recipe(self) -> Recipe:
        """The recipe with its overrides, from its file or from the last attempt."""
        from dray.runs import prepare  # half a second, for which no list of runs waits

        if self.last:
            return prepare.over(self.last.recipe, self.overrides)
        return prepare.read_recipe(self.path, self.overrides, self.command)


def chosen(
    arguments: list[str] | None,
    context: typer.Context,
    ranks: int | None = None,
    gpus: int = 0,
    run: Path | None = None,
) -> Chosen:
    """A recipe or a command, with its settings. A file that exists is a recipe, even with = in its name.

    If neither is given, both come from the plan of the last attempt of `run`.
    """
    if ranks and gpus and ranks != gpus:
        raise ConfigError(
            "--ranks and --gpus-per-node differ, but each rank needs one GPU",
            found=f"--ranks {ranks} and --gpus-per-node {gpus}",
            fix=f"leave out --gpus-per-node, or set --ranks {gpus}",
        )
    command, rest = tuple(context.obj or ()), [*(arguments or [])]
    path = found(Path(rest.pop(0))) if rest and ("=" not in rest[0] or Path(rest[0]).is_file()) else None
    if path and not command and path.suffix in (".py", ".sh"):
        raise ConfigError(
            "a program was given instead of a recipe",
            found=path,
            fix=f"put -- before it: {shlex.join([*rest, '--', str(path)])}",
        )
    if path and command:
        raise ConfigError(
            "a recipe and a command were given, but a run has only one of them",
            found=f"{path} and {' '.join(command)}",
            fix="leave out one; a recipe can have its own command: [command] argv",
        )
    if ranks:
        rest.append(f"ranks_per_node={ranks}")
    if path or command:
        return Chosen(path, tuple(rest), command)
    from dray.runs.store import is_run

    if run is None or not is_run(run):
        raise ConfigError(
            "there is nothing to run",
            wanted="a recipe, such as recipes/smoke-cpu.toml, or a command after --",
            found=f"no run {run}" if run else "",
            fix=f"dray runs --runs {shlex.quote(str(run.parent))}" if run else "dray recipe list",
        )
    from dray.runs import prepare  # likewise

    last = prepare.last(run)
    return Chosen(None, tuple(rest), (), last, gpus=0 if ranks else last.gpus)


def refuse_or_warn(plan: Plan) -> None:
    """Raise the first refusal of a plan, or print its warnings."""
    plan.refuse()
    for finding in plan.findings:
        print(f"dray: {finding.level}: {finding}", file=sys.stderr)
