"""`dray runs`: list the runs, the newest first."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Annotated

import typer

from dray.cli import times
from dray.cli.on import On, hand_over
from dray.cli.options import Runs
from dray.contract.control_characters import cell
from dray.contract.findings import ConfigError, counted
from dray.runs import cost, state
from dray.runs.look import look
from dray.runs.squeue import Queue
from dray.runs.state import State
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
        typer.Option("--state", metavar="STATE", help=f"Only this state: {', '.join(state.STATES)}; may be repeated."),
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
    wrong = sorted({*(states or ())} - {*state.STATES})
    if wrong:
        raise ConfigError("--state has a wrong value", wanted=f"one of {', '.join(state.STATES)}", found=wrong[0])
    queue = Queue()
    newest = newest_first(folder)
    found = (look(one, queue) for one in newest)
    fitting = _fitting(found, states or (), recipe, times.since(since))
    limit = ((0 if as_json else _LAST) if last is None else last) or None
    shown = list(islice(fitting, limit))
    if as_json:
        print(json.dumps([one.model_dump() for one in shown], indent=1))
        return
    if not shown:
        print(
            f"no runs in {folder}" if not newest else f"none of the {counted(len(newest), 'run')} in {folder} matches"
        )
        return
    table(shown)
    if len(shown) == limit and next(fitting, None):
        print(f"the newest {limit} are shown; -n 0 shows all")


def _fitting(found: Iterator[State], states: Sequence[str], recipe: str, since: float) -> Iterator[State]:
    for one in found:
        began = times.seconds(one.started) or 0.0
        named = not recipe or fnmatchcase(one.recipe or "", recipe)
        if named and began >= since and (not states or one.state in states):
            yield one


def table(shown: Sequence[State]) -> None:
    """Print columns. Lines are never wrapped, for tools such as awk; on a narrow terminal some columns are left out."""
    rows = [_row(one) for one in shown]
    widths = {head: max(map(len, (head, *(row[place] for row in rows)))) for place, head in enumerate(_HEADS)}
    if terminal := sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        for head in _LESS:
            if sum(widths.values()) + 2 * (len(widths) - 1) > columns:
                del widths[head]
    colours = terminal and not os.environ.get("NO_COLOR")
    for row in (_HEADS, *rows):
        found = dict(zip(_HEADS, row, strict=True))
        cells = [
            found[head].rjust(width) if head in _RIGHT else found[head].ljust(width) for head, width in widths.items()
        ]
        if colours and row[1] in _COLOURS:
            cells[1] = typer.style(cells[1], fg=_COLOURS[row[1]])
        print("  ".join(cells).rstrip())


def _row(one: State) -> tuple[str, ...]:
    step = "" if one.step is None else f"{one.step:,}"
    if one.steps is not None:
        step = f"{step or '0'}/{one.steps:,}"
    return (
        cell(one.run),
        one.state,
        cell(one.recipe or ""),
        f"{len(one.nodes) or ''}",
        step,
        "" if one.loss is None else f"{one.loss:.3f}",
        times.local(one.started),
        str(one.attempts),
        cost.short(one.spent),
    )
