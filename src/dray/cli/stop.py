"""`dray stop`: ask a run to save and end."""

from __future__ import annotations

from functools import partial

import typer

from dray.cli.args import NamedRun, Runs
from dray.cli.on import On, hand_over
from dray.runs.active_run.stop import stop_run
from dray.runs.store import find, require_own


def stop(
    run: NamedRun,
    now: bool = False,
    no_wait: bool = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Ask a run to save a checkpoint and end, wait, and show how it ended. The job is not requeued.

    A job that waits in the queue is cancelled.

    --now: End it at once; unsaved steps are lost.
    --no-wait: Return at once; the run still saves and ends.

    dray stop 4711
    """
    hand_over(on)
    try:
        stop_run(require_own(find(run, runs)), now=now, wait=not no_wait, say=partial(print, flush=True))
    except KeyboardInterrupt:
        print("the run still saves and ends; dray stop shows how it ended")
        raise typer.Exit(130) from None
