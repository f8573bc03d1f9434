"""Arguments that several verbs take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dray import process
from dray.cli import candidates

Nodes = Annotated[
    int | None, typer.Option("--nodes", "-N", min=1, max=65_536, help="Number of nodes. Default: the recipe's.")
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="Ranks per node, as torchrun's --nproc-per-node; with GPUs, one GPU for each."),
]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs per node, one rank for each.")]
GpuMemory = Annotated[
    float | None,
    typer.Option(min=0, metavar="GB", help="Memory of one GPU. Default: the site's. 0: refuse no model for its size."),
]
Site = Annotated[
    str,
    typer.Option(
        envvar="DRAY_SITE",
        help="A site's name or file. Default: the site whose file names this cluster.",
        autocompletion=candidates.sites,
    ),
]


def again(*options: str, command: Sequence[str] = ()) -> list[str]:
    """The command line that the user typed, with more options or settings, which override earlier ones."""
    typed = sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
    return [*program(), *typed, *options, *(["--", *command] if command else [])]


def typed(context: typer.Context, name: str) -> bool:
    """Whether the user typed this option: a variable such as DRAY_RUNS holds on this machine, not at a remote."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def program() -> list[str]:
    """The argv with which the user called dray."""
    path = sys.argv[0]
    name = Path(path).name
    dray = [sys.executable, "-m", "dray"] if name.endswith(".py") else [path]
    return [name] if process.which(name) == path else dray


Runs = Annotated[
    Path | None, typer.Option("--runs", envvar="DRAY_RUNS", help="Folder with the run folders. Default: ./runs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]",
        help="The run: its folder, its name or the beginning of it, or a job number (42 or 42_3). Default: the newest.",
        autocompletion=candidates.runs,
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
