"""`dray runs`: list the runs, the newest first."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import times
from dray.cli.args import Json, Runs
from dray.cli.on import On, hand_over
from dray.contract.control_characters import cell
from dray.contract.findings import ConfigError
from dray.runs import metrics
from dray.runs.slurm import Slurm
from dray.runs.status import STATES, State, listed
from dray.runs.store import default_runs, newest_first

_LESS = ("COST", "ATTEMPTS", "NODES", "RECIPE", "STARTED")
"""The order in which columns are left out on a narrow terminal; `dray status` shows all."""
_RIGHT = {"NODES", "STEP", "LOSS", "ATTEMPTS", "COST"}


def runs(
    states: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help=f"Only this state: {', '.join(STATES)}; may be repeated."),
    ] = None,
    since: str = "",
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Number of runs, 0 for all.")] = 30,
    as_json: Json = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """List runs, the newest first: state, recipe, nodes, step, loss, start, attempts and cost.

    The state comes from the run's files, and from Slurm's queue if this machine has Slurm.

    --since AGE: Only runs that began since then, such as 90m, 12h, 3d or 2w.

    dray runs --state failed --state lost --since 3d
    """
    hand_over(on)
    folder = (runs or default_runs()).absolute()
    wrong = sorted({*(states or ())} - {*STATES})
    if wrong:
        raise ConfigError("--state has a wrong value", wanted=f"one of {', '.join(STATES)}", found=wrong[0])
    oldest = time.time() - times.age("--since", since) if since else 0.0
    fitting = _fitting(folder, states or STATES, oldest)
    shown = list(islice(fitting, last or None))
    if as_json:
        print(json.dumps([seen.model_dump() for seen in shown], indent=1))
        return
    if shown:
        table(shown)
    else:
        print(f"no such runs in {folder}" if states or since else f"no runs in {folder}")
    if len(shown) == last and next(fitting, None):
        print(f"the newest {last} are shown; -n 0 shows all")


def _fitting(folder: Path, states: Sequence[str], oldest: float) -> Iterator[State]:
    slurm = Slurm()
    for run in newest_first(folder):
        seen = listed(run, slurm)
        if seen.state in states and (times.seconds(seen.started) or 0.0) >= oldest:
            yield seen


def table(shown: Sequence[State]) -> None:
    """Print columns. Lines are never wrapped, for tools such as awk; on a narrow terminal some columns are left out."""
    cells = [_cells(seen) for seen in shown]
    heads = {head: head for head in cells[0]}
    rows = [heads, *cells]
    widths = {head: max(len(row[head]) for row in rows) for head in heads}
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        for head in _LESS:
            if sum(widths.values()) + 2 * (len(widths) - 1) > columns:
                del widths[head]
    for row in rows:
        line = [row[head].rjust(width) if head in _RIGHT else row[head].ljust(width) for head, width in widths.items()]
        print("  ".join(line).rstrip())


def _cells(seen: State) -> dict[str, str]:
    step = "" if seen.step is None else f"{seen.step:,}"
    if seen.steps is not None:
        step = f"{step or '0'}/{seen.steps:,}"
    return {
        "RUN": cell(seen.run),
        "STATE": seen.state,
        "RECIPE": cell(seen.recipe or ""),
        "NODES": f"{len(seen.nodes) or ''}",
        "STEP": step,
        "LOSS": "" if seen.loss is None else f"{seen.loss:.3f}",
        "STARTED": times.local(seen.started),
        "ATTEMPTS": str(seen.attempts),
        "COST": metrics.cost_text(seen.spent),
    }
