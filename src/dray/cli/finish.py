"""`dray finish`: the last step of a job."""

from __future__ import annotations

import io
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.streams import show
from dray.planning.grace import DEFAULT_S
from dray.runs import stop, webhook
from dray.runs.finish import finish as conclude
from dray.runs.result import summary
from dray.runs.store import RunPaths, attempt_at
from dray.runs.write import read


def finish(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    code: Annotated[int, typer.Option(min=0, max=255, help="Exit code of the step that started the nodes.")],
    stopped: Annotated[bool, typer.Option(help="The run was stopped.")] = False,
) -> None:
    """Write result.json, print how the run ended, and end with the run's exit code.

    Standard input has what Slurm and the job's script know of the job, and `webhook=URL`.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what stopped the run may be sent again
    paths = attempt_at(folder)
    known = sys.stdin.buffer.read().decode(errors="replace") if sys.stdin and not sys.stdin.isatty() else ""
    told = stop.parse(known, now=time.time(), grace=_grace(paths))
    # Slurm may signal the nodes alone, as in a preemption: then the job's script has heard nothing, and no rank fails.
    why = told if stopped or (code and told.by_slurm and not any(paths.failures.glob("*.json"))) else None
    result = conclude(paths, code=code, stopped=why, batch=stop.of_a_batch_job(known), known=known)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
        sys.stdout = show(sys.stdout)  # a webhook's server may answer anything
    with suppress(OSError):  # a full disk or a closed pipe; the exit code still tells
        print(text := summary(result, paths))
        url = next((line[8:] for line in known.splitlines() if line.startswith("webhook=")), "")
        if url and (failed := webhook.tell(url, result, text)):
            print(f"warning: {failed}")
    raise typer.Exit(result.exit_code)


def _grace(paths: RunPaths) -> int:
    """The grace of the plan; a damaged plan is reported later."""
    with suppress(Exception):
        return read(paths).grace_s
    return DEFAULT_S
