"""`dray diff`: what differs between two runs, with their losses and times."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import Runs
from dray.contract.findings import ConfigError
from dray.runs import compared, pack
from dray.runs.store import attempts, default_runs, find, newest_attempt, newest_first

A = Annotated[str, typer.Argument(metavar="A", help="A run's folder, name or job number, or a packed capsule.")]
B = Annotated[str, typer.Argument(metavar="[B]", help="Another run or capsule. Default: the newest other run.")]


def diff(
    a: A,
    b: B = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    runs: Runs = None,
) -> None:
    """Show what differs between two runs, the most important first, and their losses and times side by side.

    dray diff 4711 4712
    """
    first = find(a, runs)
    second = find(b, runs) if b else _newest_beside(first, runs)
    if _plan_of(first) == _plan_of(second):
        raise ConfigError(
            "both names mean the same run",
            where=first,
            wanted="two runs, or two attempts",
            found=f"{a} and {b}",
            fix=f"dray diff {shlex.quote(a)} OTHER; dray runs lists all runs",
        )
    with pack.opened(str(first), runs) as ours, pack.opened(str(second), runs) as theirs:
        found = compared.compare(ours, theirs)
    print(found.model_dump_json(indent=1) if as_json else "\n".join(compared.text(found)))


def _plan_of(found: Path) -> Path:
    """The attempt whose plan is looked at; a packed capsule is itself."""
    return (found if found.is_file() else newest_attempt(found).folder).resolve()


def _newest_beside(first: Path, runs: Path | None) -> Path:
    """The newest run besides the first."""
    folder = (runs or default_runs()).absolute()
    own = {first.resolve(), first.resolve().parent}
    for run in newest_first(folder):
        if attempts(run) and run.resolve() not in own:
            return run
    raise ConfigError(
        "there is no other run to compare with", where=folder, wanted="two runs", fix="dray diff A B, with a path for B"
    )
