"""`dray top`: watch a run live, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.text import Text

from dray.cli import status
from dray.cli.args import Run, Runs
from dray.cli.progress import Steps
from dray.cli.streams import is_gone, shown
from dray.contract import files
from dray.contract.control_characters import printable
from dray.runs.status import State, Watched
from dray.runs.store import find

_LOOK_S = 1.0
_NODES_PER_S = 64  # each look asks the shared disk for the state of all logs
_LINES = 6


def top(run: Run = "", runs: Runs = None) -> None:
    """Watch a run live: progress, loss, speed, nodes and last lines. Ctrl-C does not stop the run.

    Into a pipe it prints a line for each logged step.

    dray top 4711
    """
    watch(find(run, runs))


def watch(run: Path, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the run until it has ended, through its next attempts too."""
    console = Console(highlight=False)
    watched, lines = Watched(run), _Lines()
    try:
        with Screen(
            console=console, transient=True, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop"
        ) as drawn:
            seen = watched.look(closely=True)
            while not watched.over(seen) and not is_gone():
                if console.is_interactive:
                    drawn.update(screen(seen), refresh=True)
                else:
                    lines.show(seen)
                wait(max(_LOOK_S, len(seen.nodes) / _NODES_PER_S))
                seen = watched.look(closely=True)
            if lines.steps:
                lines.steps.look()
    except KeyboardInterrupt:
        print("\nthe run goes on; dray top shows it again", flush=True)
        return
    print("\n".join(status.text(seen)), flush=True)


class _Lines:
    """For a pipe: a line for each step, and for each change of state."""

    def __init__(self) -> None:
        self.steps: Steps | None = None
        self._attempt: int | None = None
        self._state = ""

    def show(self, seen: State) -> None:
        """Print what is new."""
        state = "\n".join([status.head(seen), *status.waiting(seen)[:1]])
        if state != self._state:
            print(state, flush=True)
            self._state = state
        if seen.paths and seen.attempt != self._attempt:
            self._attempt, self.steps = seen.attempt, Steps(seen.paths.metrics)
        if self.steps:
            self.steps.look()


def screen(seen: State) -> RenderableType:
    """What the terminal shows of a run."""
    parts = [_text(status.head(seen), "bold")]
    parts += [_text(line) for line in [*status.waiting(seen), *status.running(seen)]]
    if seen.paths:
        parts += [_text(f"  | {shown(line.encode())}", "dim") for line in files.tail(seen.paths.rank_log(0), _LINES)]
    return Group(*parts)


def _text(line: str, style: str = "") -> Text:
    return Text(str(printable(line)), style=style, no_wrap=True, overflow="ellipsis")
