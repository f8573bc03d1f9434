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

from dray.planning.grace import DEFAULT_S
from dray.runs import slurm, status
from dray.runs.active_run.watch import read_webhook, tell_webhook
from dray.runs.finish import finish as conclude
from dray.runs.metrics import whole
from dray.runs.result import summary
from dray.runs.store import Attempt, Run, attempt_at


def finish(
    run: Path,
    code: Annotated[int, typer.Option(min=0, max=255, help="Exit code of the step that started the nodes.")],
    stopped: bool = False,
    url_file: Annotated[
        Path | None, typer.Option("--webhook", help="File with the URL of whom to tell how the run ended.")
    ] = None,
) -> int:
    """Write result.json, print how the run ended, and end with the run's exit code.

    Standard input has what Slurm and the job's script know of the job.

    RUN: A run folder.
    --stopped: The run was stopped.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what stopped the run may be sent again
    paths = attempt_at(run)
    known = sys.stdin.buffer.read().decode(errors="replace") if sys.stdin and not sys.stdin.isatty() else ""
    grace = whole(Attempt(Run(paths.run), paths.attempt).plan, "grace_s") or DEFAULT_S
    told = status.stop_of_job(known, now=time.time(), grace=grace)
    # Slurm may signal the nodes alone, as in a preemption: then the job's script has heard nothing, and no rank fails.
    why = told if stopped or (code and told.by_slurm and not any(paths.failures.glob("*.json"))) else None
    fields = slurm.fields(known)
    result = conclude(paths, code=code, stopped=why, batch=slurm.is_batch(fields), known=known)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with suppress(OSError):  # a full disk or a closed pipe; the exit code still tells
        print(text := summary(result, paths))
        url = read_webhook(url_file) if url_file else ""
        if url and (failed := tell_webhook(url, result, text)):
            print(f"warning: {failed}")
    return result.exit_code
