"""`dray stop`: ask a run to save and end."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli.on import On, hand_over
from dray.cli.options import Run, Runs
from dray.runs import halt
from dray.runs.store import find, require_own


def stop(
    run: Run = "",
    now: Annotated[
        bool, typer.Option("--now", help="End it at once, by scancel or SIGTERM; unsaved steps are lost.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has ended.")] = True,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Ask a run to save a checkpoint and end, wait, and show how it ended. The job is not requeued.

    A job that waits in the queue is cancelled.

    dray stop 4711
    """
    hand_over(on)
    try:
        halt.stop(require_own(find(run, runs) if run else halt.newest(runs)), now=now, wait=wait, say=_say)
    except KeyboardInterrupt:
        print("the run still saves and ends; dray stop shows how it ended")
        raise typer.Exit(130) from None


def _say(line: str) -> None:
    print(line, flush=True)
