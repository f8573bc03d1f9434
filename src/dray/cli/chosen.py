"""The arguments that say what to run, for several verbs: a recipe and settings, or a command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dray import engines
from dray.cli import candidates
from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, counted
from dray.images import store
from dray.planning.schema import Plan
from dray.runs import write
from dray.runs.store import is_run

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]... [-- COMMAND...]",
        help="A recipe, and settings that override it; or, after --, a command that runs on every rank instead.",
        autocompletion=candidates.recipe_or_key,
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        help="torchrun, accelerate, deepspeed, python or ray. Default: the recipe's.",
        autocompletion=candidates.one_of(("torchrun", "accelerate", "deepspeed", "python", "ray")),
    ),
]


def found(path: Path) -> Path:
    """A recipe's file: a path from here or from the checkout, or a NAME that `dray recipe list` prints.

    If there is none, the path that the user probably meant: reading it makes the refusal.
    """
    with suppress(OSError):  # no file can have this name, as the reader says later
        if not path.exists():
            ours = dray_home.root()
            candidates = (ours / path, ours / "recipes" / f"{path}.toml")
            name = len(path.parts) == 1 and path.suffix != ".toml"
            misspelt = candidates[1] if name else path if path.parent.is_dir() else candidates[0]
            return next((file for file in candidates if file.is_file()), misspelt if misspelt.parent.is_dir() else path)
    return path


RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or a name that `dray recipe list` prints.",
        callback=found,
        autocompletion=candidates.recipes,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings that override the recipe's.", autocompletion=candidates.keys
    ),
]
_ENGINES = engines.names("local", "hosts")


def _engine(name: str) -> str:
    if name not in _ENGINES:
        raise ConfigError("--engine has a wrong value", wanted=f"one of {', '.join(_ENGINES)}", found=name)
    return name


Engine = Annotated[
    str,
    typer.Option(
        callback=_engine,
        autocompletion=candidates.one_of(_ENGINES),
        metavar=f"[{'|'.join(_ENGINES)}]",
        help="Container engine; bare: this Python, without an image.",
    ),
]


@dataclass(frozen=True)
class Chosen:
    """What to run, as the user asked for it."""

    path: Path | None
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    ranks: int | None
    last: write.Last | None = None
    """The last attempt of an existing run, if neither a recipe nor a command was given."""

    @property
    def beside(self) -> Path:
        """The folder of the recipe; for a command the working folder."""
        if self.last:
            return dray_home.root()
        return self.path.absolute().parent if self.path else Path.cwd()

    @property
    def gpus(self) -> int:
        """The GPUs of a node in the last attempt; 0 if --ranks was given."""
        return self.last.gpus if self.last and not self.ranks else 0

    @property
    def image(self) -> str:
        """The image file that was named for the last attempt (DRAY_IMAGE, --image); empty for dray's own image."""
        if not self.last or any(one.startswith(("image=", "adopted=")) for one in self.overrides):
            return ""
        plan, file = self.last.plan, Path(self.last.plan.image)
        own = store.sif(dray_home.root(), plan.recipe.image_name)
        is_own = file.suffix != own.suffix or (own.exists() and file.exists() and own.samefile(file))
        return "" if is_own or not file.is_file() else str(file)

    def say(self, options: Sequence[str] = ()) -> None:
        """Print which run is resumed, and with what: program, image, size and these options of sbatch."""
        if not self.last:
            return
        plan, recipe = self.last.plan, self.last.recipe
        program = shlex.join(recipe.command.argv) if recipe.command else f"recipe {recipe.name}"
        size = counted(recipe.nodes, "node") + (f" of {counted(self.last.gpus, 'GPU')}" if self.last.gpus else "")
        more = f"; with {shlex.join(self.overrides)}" if self.overrides else ""
        more += f"; sbatch {shlex.join(options)}" if options else ""
        line = f"{program}, image {self.image or recipe.image_name}, launcher {recipe.launcher}, {size}{more}"
        print(printable(f"resumes {plan.run} by the plan of attempt {plan.attempt}: {line}"), file=sys.stderr)

    def recipe(self) -> Recipe:
        """The recipe with its overrides, from its file or from the last attempt."""
        if self.last:
            return write.over(self.last.recipe, self.overrides)
        return write.read_recipe(self.path, self.overrides, self.command)


def chosen(
    arguments: list[str] | None,
    launcher: str,
    context: typer.Context,
    ranks: int | None = None,
    gpus: int = 0,
    run: Path | None = None,
) -> Chosen:
    """A recipe or a command, with its settings. A file that exists is a recipe, even with = in its name.

    If neither is given, both come from the plan of the last attempt of `run`.
    """
    require_gpus(ranks, gpus)
    command, rest = tuple(context.obj or ()), [*(arguments or [])]
    if rest and not command and Path(rest[0]).suffix in (".py", ".sh"):
        raise ConfigError(
            "a program was given instead of a recipe",
            wanted="a recipe, such as recipes/smoke-cpu.toml, or a command after --",
            found=rest[0],
            fix=f"put -- before it: {shlex.join([*rest[1:], '--', rest[0]])}",
        )
    path = found(Path(rest.pop(0))) if rest and ("=" not in rest[0] or Path(rest[0]).is_file()) else None
    if path and command:
        raise ConfigError(
            "a recipe and a command were given, but a run has only one of them",
            found=f"{path} and {' '.join(command)}",
            fix="leave out one; a recipe can have its own command: [command] argv",
        )
    options = {"launcher": launcher, "ranks_per_node": ranks}
    overrides = (*rest, *(f"{key}={value}" for key, value in options.items() if value))
    if path or command:
        return Chosen(path, overrides, command, ranks)
    if run is None or not is_run(run):
        raise ConfigError(
            "there is nothing to run",
            where=run or "",
            wanted="a recipe, such as recipes/smoke-cpu.toml; a command after --; or --run=NAME of an existing run",
            found=f"no run {run.name}" if run else "",
            fix=f"dray runs --runs {shlex.quote(str(run.parent))}" if run else "",
        )
    return Chosen(None, overrides, (), ranks, write.last(run))


def require_gpus(ranks: int | None, gpus: int) -> None:
    """Refuse --ranks and --gpus-per-node with different numbers."""
    if ranks and gpus and ranks != gpus:
        raise ConfigError(
            "--ranks and --gpus-per-node differ, but each rank needs one GPU",
            wanted="the same number for both",
            found=f"--ranks {ranks} and --gpus-per-node {gpus}",
            fix=f"leave out --gpus-per-node, or set --ranks {gpus}",
        )


def report(plan: Plan) -> None:
    """Raise the first refusal of a plan, or print its warnings."""
    plan.refuse()
    for finding in plan.findings:
        print(f"dray: {finding.level}: {finding}", file=sys.stderr)
