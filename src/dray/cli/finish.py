"""`dray finish`: the last thing a job does."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dray.runs import stop
from dray.runs.finish import finish as conclude
from dray.runs.finish import summary
from dray.runs.paths import newest_attempt


def finish(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    code: Annotated[int, typer.Option(help="What starting the nodes ended with.")],
    stopped: Annotated[bool, typer.Option(help="It was stopped; standard input has what Slurm knows of that.")] = False,
) -> None:
    """Write result.json, print how the run ended, and end with the run's exit code."""
    paths = newest_attempt(folder)
    result = conclude(paths, code=code, stopped=stop.parse(sys.stdin.read(), now=time.time()) if stopped else None)
    print(summary(result, paths))
    raise typer.Exit(result.exit_code)
