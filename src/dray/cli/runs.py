"""`dray runs`: list the runs, the newest first."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import times
from dray.cli.args import Runs
from dray.cli.on import On, hand_over
from dray.contract.control_characters import cell
from dray.contract.findings import ConfigError, counted
from dray.runs import cost
from dray.runs.slurm import Slurm
from dray.runs.status import STATES, State, listed
from dray.runs.store import default_runs, newest_first

_HEADS = ("RUN", "STATE", "RECIPE", "NODES", "STEP", "LOSS", "STARTED", "ATTEMPTS", "COST")
_LESS = ("COST", "ATTEMPTS", "NODES", "RECIPE", "STARTED")
"""The order in which columns are left out on a narrow terminal; `dray status` shows all."""
_LAST = 30
_RIGHT = {"NODES", "STEP", "LOSS", "ATTEMPTS", "COST"}
_COLOURS = {"running": "green", "queued": "cyan", "failed": "red", "lost": "red", "stopped": "yellow"}


def runs(
    states: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help=f"Only this state: {', '.join(STATES)}; may be repeated."),
    ] = None,
    recipe: Annotated[str, typer.Option(metavar="NAME", help="Only runs of this recipe; gpt2* matches several.")] = "",
    since: times.Since = "",
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=0, help="Number of runs, 0 for all. Default: 30; with --json all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """List runs, the newest first: state, recipe, nodes, step, loss, start, attempts and cost.

    The state comes from the run's files, and from Slurm's queue if this machine has Slurm.

    dray runs --state failed --state lost --since 3d
    """
    hand_over(on)
    folder = (runs or default_runs()).absolute()
    wrong = sorted({*(states or ())} - {*STATES})
    if wrong:
        raise ConfigError("--state has a wrong value", wanted=f"one of {', '.join(STATES)}", found=wrong[0])
    newest = newest_first(folder)
    fitting = _fitting(newest, states or STATES, recipe or "*", times.since(since))
    limit = ((0 if as_json else _LAST) if last is None else last) or None
    shown = list(islice(fitting, limit))
    if as_json:
        print(json.dumps([seen.model_dump() for seen in shown], indent=1))
    elif shown:
        table(shown)
        if len(shown) == limit and next(fitting, None):
            print(f"the newest {limit} are shown; -n 0 shows all")
    elif newest:
        print(f"none of the {counted(len(newest), 'run')} in {folder} matches")
    else:
        print(f"no runs in {folder}")


def _fitting(newest: Sequence[Path], states: Sequence[str], recipe: str, since: float) -> Iterator[State]:
    slurm = Slurm()
    for folder in newest:
        seen = listed(folder, slurm)
        began = times.seconds(seen.started) or 0.0
        if seen.state in states and fnmatchcase(seen.recipe or "", recipe) and began >= since:
            yield seen


def table(shown: Sequence[State]) -> None:
    """Print columns. Lines are never wrapped, for tools such as awk; on a narrow terminal some columns are left out."""
    rows = [dict(zip(_HEADS, row, strict=True)) for row in (_HEADS, *map(_row, shown))]
    widths = {head: max(len(row[head]) for row in rows) for head in _HEADS}
    terminal = sys.stdout.isatty()
    if terminal:
        columns = shutil.get_terminal_size().columns
        for head in _LESS:
            if sum(widths.values()) + 2 * (len(widths) - 1) > columns:
                del widths[head]
    colours = _COLOURS if terminal and not os.environ.get("NO_COLOR") else {}
    for row in rows:
        cells = {head: row[head].rjust(width) if head in _RIGHT else row[head].ljust(width)
                 for head, width in widths.items()}  # fmt: skip
        if row["STATE"] in colours:
            cells["STATE"] = typer.style(cells["STATE"], fg=colours[row["STATE"]])
        print("  ".join(cells.values()).rstrip())


def _row(seen: State) -> tuple[str, ...]:
    step = "" if seen.step is None else f"{seen.step:,}"
    if seen.steps is not None:
        step = f"{step or '0'}/{seen.steps:,}"
    loss = "" if seen.loss is None else f"{seen.loss:.3f}"
    return (
        cell(seen.run), seen.state, cell(seen.recipe or ""), f"{len(seen.nodes) or ''}", step, loss,
        times.local(seen.started), str(seen.attempts), cost.text(seen.spent),
    )  # fmt: skip
