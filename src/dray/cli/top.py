"""`dray top`: watch a run live, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dray.cli import status
from dray.cli.options import Run, Runs
from dray.cli.progress import Steps
from dray.cli.streams import is_gone, shown
from dray.contract import files
from dray.contract.control_characters import printable
from dray.runs import metrics
from dray.runs.look import Watched
from dray.runs.stages import Node, duration
from dray.runs.state import RUNNING, State
from dray.runs.store import RunPaths, find

_LOOK_S = 1.0
_MANY, _SLOWLY_S = 64, 15.0  # each look asks for the state of all logs: those of many nodes are read less often
_NODES, _LINES, _TAIL = 8, 6, 1 << 14
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
        with Screen(console=console, transient=True, auto_refresh=False, vertical_overflow="crop") as drawn:
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
            self._metrics, self._steps = paths.metrics, Steps(paths.metrics, seen.steps, position=max(0, size - _TAIL))
        self.steps()

    def steps(self) -> None:
        """Print new steps."""
        if self._steps:
            self._steps.look()


def screen(seen: State, paths: RunPaths, console: Console) -> RenderableType:
    """What the terminal shows of a run."""
    width, parts = max(10, min(60, console.width - 40)), list[RenderableType]()
    parts.append(_text(status.head(seen), "bold"))
    parts += [_text(line) for line in status.waiting(seen)]
    if seen.live:
        parts.append(_text(f"  stage: {seen.live.stage}"))
    if seen.step is not None and seen.steps:
        row = Table.grid(padding=(0, 1))
        row.add_row(
            "", ProgressBar(total=seen.steps, completed=seen.step, width=width), f"{seen.step / seen.steps:.0%}"
        )
        parts += [row, _text(f"  {status.figures(seen)}")]
    with suppress(OSError):
        losses = [
            metrics.number(event, "loss") for event in metrics.tail(paths.metrics) if event.get("event") == "step"
        ]
        if line := sparkline([loss for loss in losses if loss is not None], width):
            parts.append(_text(f"  loss {line}"))
    if seen.live:
        parts += [_text(f"  {line}") for line in _nodes(seen.live.nodes)]
        of_nodes = {note for node in seen.live.nodes for note in node.notes}
        parts += [_text(f"  {note}", "yellow") for note in seen.live.notes if note not in of_nodes]
    if seen.attempt:
        parts += [_text(f"  | {shown(line.encode())}", "dim") for line in files.tail(paths.rank_log(0), _LINES)]
    return Group(*parts)


def _text(line: str, style: str = "") -> Text:
    return Text(str(printable(line)), style=style, no_wrap=True, overflow="ellipsis")


def sparkline(values: list[float], width: int) -> str:
    """The values as a line of blocks, then the largest and the smallest; a block is the mean of its values."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    cuts = [place * len(values) // width for place in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(cuts)]
    least, span = min(means), (max(means) - min(means)) or 1.0
    drawn = "".join(_BLOCKS[round((mean - least) / span * (len(_BLOCKS) - 1))] for mean in means)
    return f"{drawn}  {max(values):.3f} to {min(values):.3f}"


def _nodes(nodes: list[Node]) -> list[str]:
    """A line for each node: first those with notes, then those that have been quiet longest."""
    order = sorted(nodes, key=lambda node: (not node.notes, -(node.quiet_s or 0.0)))
    lines = []
    for node in order[:_NODES]:
        ranks = f"rank {node.ranks[0]}" if len(node.ranks) == 1 else f"ranks {node.ranks[0]} to {node.ranks[-1]}"
        quiet = "no log yet" if node.quiet_s is None else f"logs written {duration(node.quiet_s)} ago"
        lines.append(", ".join([f"{node.name}  {ranks}  {quiet}", *node.notes]))
    if len(order) > _NODES:
        lines.append(f"and {len(order) - _NODES} more nodes")
    return lines
