"""`dray logs`: what the nodes and ranks of a run print."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from dray.cli import times
from dray.cli.on import On, hand_over
from dray.cli.options import Run, Runs
from dray.cli.streams import is_gone, shown
from dray.contract.findings import ConfigError
from dray.runs import logs as files
from dray.runs.logs import Log
from dray.runs.status import NO_RESULT, QUEUED, RUNNING, State, Watched
from dray.runs.store import RunPaths, dig, find, node_number, read_json

_POLL_S, _LOOK_EVERY = 0.2, 5
_STATS = 2000  # a second, which a shared disk can serve
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


def logs(
    run: Run = "",
    node: Annotated[
        str, typer.Option(metavar="N", help="Only this node and its ranks: its name, or its number from 0.")
    ] = "",
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the run ends, through its next attempts too.")
    ] = False,
    since: Annotated[
        str, typer.Option(metavar="WHEN", help="Only lines since then: 90m, 12h, 3d, 18:00, or 2026-11-24T18:00.")
    ] = "",
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=0, metavar="N", help="Only the last N lines; with -f also all new ones."),
    ] = None,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show the logs of all nodes and ranks, sorted by time if their lines have one.

    dray logs 4711 --rank 3 -n 50 -f
    """
    hand_over(on)
    folder, begin = find(run, runs), times.since(since)
    watched = Watched(folder)
    seen = watched.look()
    printer = Printer()
    show = _Shown(watched, printer, node, rank)
    if rank is not None and seen.ranks and rank >= seen.ranks:
        raise ConfigError(
            "the run has no such rank", where=seen.folder, wanted=f"a rank from 0 to {seen.ranks - 1}",
            found=f"--rank {rank}", fix=f"--rank {seen.ranks - 1}",
        )  # fmt: skip
    if not show.begin(seen, begin, last, whole=not follow) and not follow:
        wanted, fix = "a log", "dray why shows how the run ended"
        if rank is not None:
            wanted, fix = f"the log of rank {rank}", "choose another --rank"
        elif node:
            wanted, fix = f"a log of node {node}", "choose another --node"
        if seen.state in (QUEUED, RUNNING):
            fix = "dray logs -f waits for the log; dray status shows what the run waits for"
        raise ConfigError(
            "there is no such log",
            where=seen.folder if seen.attempt is None else f"{seen.folder}/attempt-{seen.attempt}/logs",
            wanted=wanted,
            found=f"the run {'has' if seen.state == NO_RESULT else 'is'} {seen.state}",
            fix=fix,
        )
    if follow:
        try:
            show.follow(seen)
        except KeyboardInterrupt:
            print("\nthe run goes on", file=sys.stderr)


class Printer:
    """Prints lines, each after the name of its rank or node; on a terminal in colours, without control characters."""

    def __init__(self) -> None:
        self._out: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # for colours, and the log's own bytes
        self.terminal = sys.stdout.isatty()
        self._coloured = self.terminal and not os.environ.get("NO_COLOR")
        self._width = 0

    def widen(self, logs: Sequence[Log]) -> None:
        """Make room for the names of these logs; the lines of a single log need none."""
        self._width = max(len(log.label) for log in logs) if len(logs) > 1 else 0

    def line(self, log: Log, line: bytes) -> None:
        """Print one line of a log; into a pipe go the log's own bytes."""
        name = f"{log.label:<{self._width}} | " if self._width else ""
        if not self.terminal:
            self._out.flush()
            self._out.buffer.write(name.encode() + line + b"\n")
            return
        if self._coloured and name:
            colour = _COLOURS[log.number % len(_COLOURS)] if log.kind == "rank" else 2
            name = f"\x1b[{colour}m{name}\x1b[0m"
        print(name + shown(line), file=self._out)

    def say(self, text: str) -> None:
        """Print a line of dray's own, on standard error."""
        sys.stdout.flush()
        print(f"dray: {text}", file=sys.stderr, flush=True)


class _Shown:
    """The logs of a run, from one attempt to the next."""

    def __init__(self, watched: Watched, printer: Printer, node: str, rank: int | None) -> None:
        self._watched, self._printer, self._node, self._rank = watched, printer, node, rank
        self._logs: dict[Path, Log] = {}
        self._attempt: int | None = None

    def begin(self, seen: State, since: float, last: int | None, *, whole: bool) -> bool:
        """Print the present lines, sorted by time, or only the `last` of them; return whether there is a log."""
        self._attempt = seen.attempt
        self._add(seen)
        paths = RunPaths(Path(seen.folder), seen.attempt or 1)
        lines = files.joined([*self._logs.values()], paths, since=since, whole=whole)
        for log, line in lines if last is None else deque(lines, last):
            self._printer.line(log, line)
            if is_gone():
                break
        return bool(self._logs)

    def follow(self, seen: State, wait: Callable[[float], None] = time.sleep) -> None:
        """Print new lines until the run has ended."""
        state = ""
        while not is_gone():
            over = self._watched.over(seen)
            self._new(self._logs.values())
            if (word := _about(seen)) != state:
                self._printer.say(state := word)
            if over:
                return
            for _ in range(_LOOK_EVERY):
                sys.stdout.flush()
                wait(max(_POLL_S, len(self._logs) / _STATS))
                self._new(self._logs.values())
            seen = self._watched.look()
            if seen.attempt != self._attempt:
                self._attempt = seen.attempt
                self._logs.clear()
            self._add(seen)

    def _new(self, logs: Iterable[Log]) -> None:
        for log, line in files.new(logs):
            self._printer.line(log, line)

    def _add(self, seen: State) -> None:
        if seen.attempt is None:
            found = files.of_job(Path(seen.folder))
        else:
            paths = RunPaths(Path(seen.folder), seen.attempt)
            plan = read_json(paths.plan, [])
            each = dig(plan, "world", "ranks_per_node")
            each = each if isinstance(each, int) and each > 0 else 1
            node = node_number(seen.nodes, self._node) if self._node else None
            on = None if self._rank is None else self._rank // each
            if node is not None and on is not None and node != on < len(seen.nodes):
                raise ConfigError(
                    "the rank is on another node",
                    wanted=f"--node {on}",
                    found=f"--node {self._node} --rank {self._rank}",
                    fix=f"--rank {self._rank} alone",
                )
            found = files.of(paths, node=node, rank=self._rank, each=each)
        for log in found:
            self._logs.setdefault(log.path, log)
        self._printer.widen([*self._logs.values()])


def _about(seen: State) -> str:
    attempt = f"attempt {seen.attempt}: " if seen.attempt else ""
    why = f" ({seen.waiting.reason})" if seen.waiting else f", {seen.why}" if seen.why else ""
    if seen.state == RUNNING and not seen.live:
        return f"{attempt}running"
    return f"{attempt}{seen.state}{why}"
