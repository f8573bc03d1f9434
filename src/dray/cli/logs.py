"""`dray logs`: what the nodes and ranks of a run print."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TextIO

import typer

from dray.cli import status
from dray.cli.args import Run, Runs
from dray.cli.on import On, hand_over
from dray.cli.streams import is_gone, shown
from dray.contract.findings import ConfigError
from dray.runs.active_run import logs as files
from dray.runs.active_run.logs import Log
from dray.runs.status import State, Watched
from dray.runs.store import find, node_number

_POLL_S = 1.0
_STATS = 2000  # a second, which a shared disk can serve
_COLOURS = (36, 33, 32, 35, 34, 31)


def logs(
    run: Run = "",
    node: str = "",
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")] = None,
    follow: bool = False,
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            "-n",
            min=0,
            metavar="N",
            help="Only the last N lines of each log; with -f all new ones. Default: all.",
        ),
    ] = None,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show the logs of all nodes and ranks, one after another.

    --node N: Only this node and its ranks: its name, or its number from 0.
    --follow, -f: Follow until the run ends, through its next attempts too.

    dray logs 4711 --rank 3 -n 50 -f
    """
    hand_over(on)
    watched = Watched(find(run, runs))
    seen = watched.look()
    if rank is not None and seen.ranks and rank >= seen.ranks:
        raise ConfigError(
            "the run has no such rank", where="--rank", wanted=f"a number from 0 to {seen.ranks - 1}", found=str(rank)
        )
    view = View(node, rank)
    view.add(seen)
    if not view.logs and not follow:
        raise ConfigError(
            "there is no such log",
            where=seen.paths.logs if seen.paths else seen.folder,
            found=status.head(seen),
            fix="dray logs without --node and --rank shows all logs; with -f it waits for one",
        )
    view.print(last, whole=not follow)
    if follow:
        try:
            view.follow(watched, seen)
        except KeyboardInterrupt:
            print("\nthe run goes on", file=sys.stderr)


class View:
    """Prints the chosen logs of a run, each line after the name of its rank or node.

    On a terminal in colours and without control characters; into a pipe go the log's own bytes.
    """

    def __init__(self, node: str = "", rank: int | None = None) -> None:
        self._out: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        self._node, self._rank = node, rank
        self._attempt: int | None = None
        self._width = 0
        self.logs: dict[Path, Log] = {}

    def add(self, seen: State) -> None:
        """Add logs that are new; those of an earlier attempt go."""
        if seen.attempt != self._attempt:
            self._attempt = seen.attempt
            self.logs.clear()
        if seen.paths is None:
            found = files.in_folder(seen.path)
        else:
            node = node_number(seen.nodes, self._node) if self._node else None
            each = (seen.ranks or 0) // max(1, len(seen.nodes))
            found = files.of(seen.paths, node=node, rank=self._rank, each=max(1, each))
        for log in found:
            self.logs.setdefault(log.path, log)
        self._width = max((len(log.label) for log in self.logs.values()), default=0)

    def print(self, last: int | None = None, *, whole: bool = False) -> None:
        """Print the new lines of each log, or only the `last` of them."""
        for log in self.logs.values():
            lines = log.new(whole=whole)
            for line in lines if last is None else deque(lines, last):
                self.line(log, line)
                if is_gone():
                    return

    def follow(self, watched: Watched, seen: State, wait: Callable[[float], None] = time.sleep) -> None:
        """Print new lines until the run has ended."""
        shown_state = ""
        while not is_gone():
            over = watched.over(seen)
            self.print()
            if (state := status.head(seen)) != shown_state:
                sys.stdout.flush()
                print(f"dray: {state}", file=sys.stderr, flush=True)
                shown_state = state
            if over:
                return
            sys.stdout.flush()
            wait(max(_POLL_S, len(self.logs) / _STATS))
            self.print()
            seen = watched.look()
            self.add(seen)

    def line(self, log: Log, line: bytes) -> None:
        """Print one line of a log."""
        name = f"{log.label:<{self._width}} | " if len(self.logs) > 1 else ""
        if not sys.stdout.isatty():
            self._out.flush()
            self._out.buffer.write(name.encode() + line + b"\n")
            return
        if name and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[log.number % len(_COLOURS)] if log.kind == "rank" else 2
            name = f"\x1b[{colour}m{name}\x1b[0m"
        print(name + shown(line), file=self._out)
