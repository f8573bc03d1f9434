"""`dray finish`: the last thing a job does."""

from __future__ import annotations

import io
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dray.runs import stop
from dray.runs.finish import finish as conclude
from dray.runs.paths import attempt_at
from dray.runs.result import summary


def finish(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    code: Annotated[int, typer.Option(min=0, max=255, help="What starting the nodes ended with.")],
    stopped: Annotated[bool, typer.Option(help="It was stopped; standard input has what Slurm knows of that.")] = False,
) -> None:
    """Write result.json, print how the run ended, and end with the run's exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what stopped the run may be sent again
    paths = attempt_at(folder)
    known = sys.stdin.buffer.read().decode(errors="replace") if stopped and sys.stdin else ""
    result = conclude(paths, code=code, stopped=stop.parse(known, now=time.time()) if stopped else None)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with suppress(OSError):  # a full disk or a closed pipe; the exit code still tells
        print(summary(result, paths))
    raise typer.Exit(result.exit_code)
