"""`dray top`: watch a run live, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dray.cli import status
from dray.cli.args import Run, Runs
from dray.cli.progress import Steps
from dray.cli.streams import is_gone, shown
from dray.contract import files
from dray.contract.control_characters import printable
from dray.runs import metrics
from dray.runs.status import RUNNING, State, Watched
from dray.runs.store import RunPaths, find

_LOOK_S = 1.0
_MANY, _SLOWLY_S = 64, 15.0  # each look asks for the state of all logs: those of many nodes are read less often
_LINES, _TAIL = 6, 1 << 14
_BLOCKS = "▁▂▃▄▅▆▇█"


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
                paths = RunPaths(Path(seen.folder), seen.attempt or 1)
                if console.is_interactive:
                    drawn.update(screen(seen, paths, console), refresh=True)
                else:
                    lines.show(seen, paths)
                wait(_LOOK_S if len(seen.nodes) <= _MANY else _SLOWLY_S)
                seen = watched.look(closely=True)
            lines.steps()
    except KeyboardInterrupt:
        print("\nthe run goes on; dray top shows it again", flush=True)
        return
    print("\n".join(status.text(seen)), flush=True)


class _Lines:
    """For a pipe: a line for each step, and for each change of state or stage."""

    def __init__(self) -> None:
        self._printed: list[str] = []
        self._steps: Steps | None = None
        self._metrics: Path | None = None

    def show(self, seen: State, paths: RunPaths) -> None:
        """Print what is new."""
        lines = [status.head(seen), *status.waiting(seen)[:1]]
        if seen.live and seen.state == RUNNING:
            lines.append(f"stage: {seen.live.stage}")
        for line in lines:
            if line not in self._printed:
                print(line, flush=True)
        self._printed = lines
        if seen.attempt and self._metrics != paths.metrics:
            size = paths.metrics.stat().st_size if paths.metrics.exists() else 0
            self._metrics, self._steps = paths.metrics, Steps(paths.metrics, max(0, size - _TAIL))
        self.steps()

    def steps(self) -> None:
        """Print new steps."""
        if self._steps:
            self._steps.look()


def screen(seen: State, paths: RunPaths, console: Console) -> RenderableType:
    """What the terminal shows of a run."""
    width, parts = max(10, min(60, console.width - 40)), list[RenderableType]()
    parts.append(_text(status.head(seen), "bold"))
    parts += [_text(line) for line in [*status.waiting(seen), *status.running(seen)]]
    if seen.step is not None and seen.steps:
        bar = Table.grid(padding=(0, 1))
        done = min(1.0, seen.step / seen.steps)
        bar.add_row("", ProgressBar(total=1.0, completed=done, width=width), f"{done:.0%}")
        parts.append(bar)
    if seen.attempt:
        with suppress(OSError):
            steps = [event for event in metrics.tail(paths.metrics) if event.get("event") == "step"]
            losses = [loss for step in steps if (loss := metrics.number(step, "loss")) is not None]
            if len(losses) > 1:
                parts.append(_text(f"  loss {sparkline(losses, width)}"))
        parts += [_text(f"  | {shown(line.encode())}", "dim") for line in files.tail(paths.rank_log(0), _LINES)]
    return Group(*parts)


def _text(line: str, style: str = "") -> Text:
    return Text(str(printable(line)), style=style, no_wrap=True, overflow="ellipsis")


def sparkline(values: list[float], width: int) -> str:
    """The values as a line of blocks, then the largest and the smallest; a block is the mean of its values."""
    width = min(width, len(values))
    cuts = [place * len(values) // width for place in range(width + 1)]
    means = [fmean(values[low:high]) for low, high in pairwise(cuts)]
    least, span = min(means), (max(means) - min(means)) or 1.0
    drawn = "".join(_BLOCKS[round((mean - least) / span * 7)] for mean in means)
    return f"{drawn}  {max(values):.3f} to {min(values):.3f}"
