"""What is to run, as several verbs take it: a recipe and settings, or a command."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dray import engines
from dray.cli import candidates
from dray.config import checkout
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.planning.schema import Plan
from dray.runs import write

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]... [-- COMMAND...]",
        help="A recipe file and settings that win over its own; or a command that runs on every rank in its place.",
        autocompletion=candidates.recipe_or_key,
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        help="torchrun, accelerate, deepspeed, python or ray, in place of the recipe's.",
        autocompletion=candidates.one_of(("torchrun", "accelerate", "deepspeed", "python", "ray")),
    ),
]


def found(path: Path) -> Path:
    """A recipe's file as it is named here, or from the checkout: recipes/NAME.toml, or NAME as `recipe list` has it.

    What is none is taken for a misspelt file, or for a misspelt NAME.
    """
    with suppress(OSError):  # a name that no file can have, which reading it says
        if not path.exists():
            ours = checkout.root()
            candidates = (ours / path, ours / "recipes" / f"{path}.toml")
            name = len(path.parts) == 1 and path.suffix != ".toml"
            misspelt = candidates[1] if name else path if path.parent.is_dir() else candidates[0]
            return next((file for file in candidates if file.is_file()), misspelt if misspelt.parent.is_dir() else path)
    return path


RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, such as recipes/smoke-cpu.toml, or its name.",
        callback=found,
        autocompletion=candidates.recipes,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings that win over the recipe's.", autocompletion=candidates.keys
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
        help="What starts the image; bare: this Python. Apptainer and Singularity: with --hostfile.",
    ),
]


@dataclass(frozen=True)
class Chosen:
    """What is to run, as the user asked for it."""

    path: Path | None
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    ranks: int | None

    @property
    def beside(self) -> Path:
        """Where the recipe is; a command runs where we stand."""
        return self.path.absolute().parent if self.path else Path.cwd()

    def recipe(self) -> Recipe:
        """Read it."""
        return write.read_recipe(self.path, self.overrides, self.command)


def chosen(
    arguments: list[str] | None, launcher: str, context: typer.Context, ranks: int | None = None, gpus: int = 0
) -> Chosen:
    """A recipe or a command, and what is set besides. A file is a recipe, also one with = in its name."""
    require_gpus(ranks, gpus)
    command, rest = tuple(context.obj or ()), [*(arguments or [])]
    if rest and not command and Path(rest[0]).suffix in (".py", ".sh"):
        raise ConfigError(
            "a program was given in the place of a recipe",
            wanted="a recipe, such as recipes/smoke-cpu.toml, or -- and a command",
            found=rest[0],
            fix=f"put -- before it: {shlex.join([*rest[1:], '--', rest[0]])}",
        )
    path = found(Path(rest.pop(0))) if rest and ("=" not in rest[0] or Path(rest[0]).is_file()) else None
    if path and command:
        raise ConfigError(
            "a recipe and a command were given, and each is a run of its own",
            found=f"{path} and {' '.join(command)}",
            fix="leave one out; a recipe may name its command itself ([command] argv)",
        )
    if not path and not command:
        raise ConfigError(
            "there is nothing to run", wanted="a recipe, such as recipes/smoke-cpu.toml, or -- and a command"
        )
    options = {"launcher": launcher, "ranks_per_node": ranks}
    return Chosen(path, (*rest, *(f"{key}={value}" for key, value in options.items() if value)), command, ranks)


def require_gpus(ranks: int | None, gpus: int) -> None:
    """A GPU for each rank."""
    if ranks and gpus and ranks != gpus:
        raise ConfigError(
            "each rank has a GPU of its own",
            wanted="--ranks and --gpus-per-node of one number",
            found=f"--ranks {ranks} and --gpus-per-node {gpus}",
            fix=f"leave out --gpus-per-node, or --ranks {gpus}",
        )


def report(plan: Plan) -> None:
    """End with the first refusal of a plan, or print what is unwise in it."""
    plan.refuse()
    for finding in plan.findings:
        print(f"dray: {finding.level}: {finding}", file=sys.stderr)
