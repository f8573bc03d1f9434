"""`dray diff`: what differs between two runs, with their losses and times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.args import Json, Runs
from dray.contract.findings import ConfigError
from dray.runs import compare
from dray.runs.store import attempts, default_runs, find, newest_first

A = Annotated[str, typer.Argument(metavar="A", help="A run's folder, name or job number.")]
B = Annotated[str, typer.Argument(metavar="[B]", help="Another run. Default: the newest other run.")]


def diff(a: A, b: B = "", as_json: Json = False, runs: Runs = None) -> None:
    """Show what differs between two runs, the most important first, and their losses and times side by side.

    dray diff 4711 4712
    """
    first = find(a, runs)
    second = find(b, runs) if b else _newest_beside(first, (runs or default_runs()).absolute())
    found = compare.runs(first, second)
    print(found.model_dump_json(indent=1) if as_json else "\n".join(compare.text(found)))


def _newest_beside(first: Path, runs: Path) -> Path:
    """The newest run besides the first."""
    for run in newest_first(runs):
        if attempts(run) and run.resolve() not in (first.resolve(), first.resolve().parent):
            return run
    raise ConfigError(
        "there is no other run to compare with", where=runs, wanted="two runs", fix="dray diff A B, with a path for B"
    )
