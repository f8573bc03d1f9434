"""Arguments that several verbs take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dray import process
from dray.cli import candidates

Nodes = Annotated[int | None, typer.Option("--nodes", "-N", min=1, max=65_536, help="Nodes, in place of the recipe's.")]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="Ranks on a node, as torchrun's --nproc-per-node; on GPUs, a GPU for each."),
]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs on a node, a rank for each.")]
GpuMemory = Annotated[
    float | None,
    typer.Option(min=0, metavar="GB", help="Memory of one GPU, in place of the site's; 0: any model fits."),
]
Site = Annotated[
    str,
    typer.Option(
        envvar="DRAY_SITE",
        help="A site's name or file; else the one whose file names this cluster.",
        autocompletion=candidates.sites,
    ),
]


def again(*options: str, command: Sequence[str] = ()) -> list[str]:
    """What the user has typed, with more options or settings, which win over the same ones before them."""
    typed = sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
    return [*program(), *typed, *options, *(["--", *command] if command else [])]


def typed(context: typer.Context, name: str) -> bool:
    """Whether the user has typed this option: a variable such as DRAY_RUNS is of this machine, and not of a remote."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def program() -> list[str]:
    """How the user has called dray."""
    path = sys.argv[0]
    name = Path(path).name
    dray = [sys.executable, "-m", "dray"] if name.endswith(".py") else [path]
    return [name] if process.which(name) == path else dray


Runs = Annotated[Path | None, typer.Option("--runs", envvar="DRAY_RUNS", help="Where run folders go; else ./runs.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document, for scripts.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]",
        help="A run's folder, name or its beginning, or a job's number (42, or 42_3 of an array); else the newest.",
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
