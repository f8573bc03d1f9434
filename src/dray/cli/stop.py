"""`dray stop`: ask a run to save and end."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli import candidates
from dray.cli.args import Runs
from dray.cli.on import On, hand_over
from dray.contract.findings import ConfigError
from dray.runs import request_stop
from dray.runs.store import find, require_own


def stop(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Its folder, name or job number.", autocompletion=candidates.runs),
    ],
    now: Annotated[bool, typer.Option("--now", help="End it at once; unsaved steps are lost.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has ended.")] = True,
    runs: Runs = None,
    on: On = "",
) -> None:  # fmt: skip
    """Ask a run to save a checkpoint and end, wait, and show how it ended. The job is not requeued.

    A job that waits in the queue is cancelled.

    dray stop 4711
    """
    hand_over(on)
    if not run:  # a shell's variable without a value
        raise ConfigError("dray stop needs a run", fix="dray runs lists them")
    try:
        request_stop.stop(require_own(find(run, runs)), now=now, wait=wait, say=_say)
    except KeyboardInterrupt:
        print("the run still saves and ends; dray stop shows how it ended")
        raise typer.Exit(130) from None


def _say(line: str) -> None:
    print(line, flush=True)
