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
from dray.contract.findings import duration
from dray.runs import metrics
from dray.runs.status import RUNNING, Node, State, Watched
from dray.runs.store import RunPaths, find

_LOOK_S = 1.0
_SMALL, _FEW, _CLOSELY_S = 4 << 20, 64, 15.0  # large metrics and many logs are read less often
_NODES, _LINES, _TAIL = 8, 6, 1 << 14
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.,-~=+*"


def top(run: Run = "", runs: Runs = None) -> None:
    """Watch a run live: progress, loss, speed, nodes and last lines. Ctrl-C does not stop the run.

    Into a pipe it prints a line for each logged step.

    dray top 4711
    """
    watch(find(run, runs))


def watch(run: Path, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the run until it has ended, through its next attempts too."""
    console = Console(highlight=False)
    view = _Terminal(run, console) if console.is_interactive else _Plain(run)
    try:
        with view:
            while not view.look() and not is_gone():
                wait(_LOOK_S)
    except KeyboardInterrupt:
        print("\nthe run goes on; dray top shows it again", flush=True)
        return
    print("\n".join(status.text(view.seen)), flush=True)


class _View:
    """What both views know."""

    def __init__(self, run: Path) -> None:
        self._watched, self._closely = Watched(run), 0.0
        self.seen = self._seen(closely=True)

    def __enter__(self) -> _View:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the terminal as it was."""

    @property
    def paths(self) -> RunPaths:
        """The paths of the shown attempt."""
        return RunPaths(Path(self.seen.folder), self.seen.attempt or 1)

    def look(self) -> bool:
        """Show the present state; return whether the run has ended."""
        closely = time.monotonic() > self._closely + _CLOSELY_S
        with suppress(OSError):
            small = len(self.seen.nodes) <= _FEW and self.paths.metrics.stat().st_size < _SMALL
            closely = closely or small
        live = self.seen.live
        self.seen = self._seen(closely=closely or not live)
        if self.seen.live is None and self.seen.state == RUNNING:
            self.seen = self.seen.model_copy(update={"live": live})
        over = self._watched.over(self.seen)
        if over:
            self.seen = self._seen(closely=True)
        self.show(over=over)
        return over

    def _seen(self, *, closely: bool) -> State:
        if closely:
            self._closely = time.monotonic()
        return self._watched.look(closely=closely)

    def show(self, *, over: bool) -> None:
        """Show what is new."""


class _Plain(_View):
    """A line for each step, and for each change of state or stage."""

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self._printed: list[str] = []
        self._steps: Steps | None = None
        self._of: Path | None = None

    def show(self, *, over: bool) -> None:
        """Print the state, if it is new and not the final one, then new steps."""
        seen = self.seen
        lines = [] if over else [status.head(seen), *status.waiting(seen)[:1]]
        lines += [f"stage: {seen.live.stage}"] if seen.live and seen.state == RUNNING else []
        for line in lines:
            if line not in self._printed:
                print(line, flush=True)
        self._printed = lines
        if seen.attempt and self._of != self.paths.metrics and not over:
            self._of, position = self.paths.metrics, 0
            with suppress(OSError):
                position = max(0, self._of.stat().st_size - _TAIL)
            self._steps = Steps(self._of, seen.steps, position=position)
        if self._steps:
            self._steps.look()


class _Terminal(_View):
    """One screen, drawn again and again."""

    def __init__(self, run: Path, console: Console) -> None:
        super().__init__(run)
        self._console = console
        self._screen = Screen(console=console, transient=True, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> _Terminal:
        self._screen.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._screen.stop()

    def show(self, *, over: bool) -> None:
        """Draw the screen, unless the run has ended: then `watch` prints how."""
        if not over:
            self._screen.update(screen(self.seen, self.paths, self._console), refresh=True)


def screen(seen: State, paths: RunPaths, console: Console) -> RenderableType:
    """What the terminal shows of a run."""
    width, parts = console.width, list[RenderableType]()
    parts.append(_text(status.head(seen), "bold"))
    parts += [_text(line) for line in status.waiting(seen)]
    if seen.live:
        parts.append(_text(f"  stage: {seen.live.stage}"))
    if seen.step is not None and seen.steps:
        bar = ProgressBar(total=seen.steps, completed=seen.step, width=max(10, min(60, width - 20)))
        row = Table.grid(padding=(0, 1))
        row.add_row("", bar, f"{min(1.0, seen.step / seen.steps):.0%}")
        parts += [row, _text(f"  {status.figures(seen)}")]
    with suppress(OSError):
        values = [
            metrics.number(event, "loss") for event in metrics.tail(paths.metrics) if event.get("event") == "step"
        ]
        utf = console.encoding.startswith("utf")
        if line := sparkline([value for value in values if value is not None], max(10, min(60, width - 40)), utf=utf):
            parts.append(_text(f"  loss {line}"))
    if seen.live:
        parts += [_text(f"  {line}") for line in _nodes(seen.live.nodes)]
        about = {note for one in seen.live.nodes for note in one.notes}
        parts += [_text(f"  {note}", "yellow") for note in seen.live.notes if note not in about]
    last = last_lines(paths.rank_log(0)) if seen.attempt else []
    parts += [_text(f"  | {line}", "dim") for line in last]
    return Group(*parts)


def _text(line: str, style: str = "") -> Text:
    return Text(str(printable(line)), style=style, no_wrap=True, overflow="ellipsis")


def sparkline(values: list[float], width: int, *, utf: bool = True) -> str:
    """The values as a line of blocks, then the largest and the smallest; a block is the mean of its values."""
    if len(values) < 2:
        return ""
    blocks = _BLOCKS if utf else _ASCII
    width = min(width, len(values))
    cuts = [place * len(values) // width for place in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(cuts)]
    least, most = min(means), max(means)
    span = (most - least) or 1.0
    drawn = "".join(blocks[int((mean - least) / span * (len(blocks) - 1) + 0.5)] for mean in means)
    return f"{drawn}  {max(values):.3f} to {min(values):.3f}"


def _nodes(nodes: list[Node]) -> list[str]:
    """A line for each node: first those with notes, then those that have been quiet longest."""
    order = sorted(nodes, key=lambda node: (not node.notes, -(node.quiet_s or 0.0)))
    width = max((len(node.name) for node in order[:_NODES]), default=0)
    lines = []
    for node in order[:_NODES]:
        ranks = f"rank {node.ranks[0]}" if len(node.ranks) == 1 else f"ranks {node.ranks[0]} to {node.ranks[-1]}"
        quiet = "no log yet" if node.quiet_s is None else f"logs written {duration(node.quiet_s)} ago"
        lines.append(", ".join([f"{node.name:<{width}}  {ranks}  {quiet}", *node.notes]))
    return lines + [f"and {len(order) - _NODES} more nodes"] * (len(order) > _NODES)


def last_lines(log: Path) -> list[str]:
    """The last lines of a rank's log, without control characters."""
    return [shown(line.encode()) for line in files.tail(log, _LINES)]
