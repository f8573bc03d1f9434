"""Functions in processes of their own: one that crashes or hangs is a result, and not the end.

They are forked from a process that has imported torch and done nothing with it, which saves ten seconds each; where
that process has touched the GPU none of its forks could, and new processes are started in their place.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

LAST_LINES = 3
NOT_DONE = "not done after"
PR_SET_PDEATHSIG = 1


class Failed(Exception):  # noqa: N818  it is a result
    """How a process ended that has not returned."""


class Process:
    """One function; each JSON value that it yields is a line of a file."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], *, limit: float, log: Path, leads: bool = False
    ) -> None:
        self.log, self.limit, self.leads = log, limit, leads
        self.values = log.with_suffix(".jsonl")
        log.parent.mkdir(parents=True, exist_ok=True)
        method = os.environ["GPU_CHECK_START"]
        made = multiprocessing.get_context(method).Process(
            target=_run, args=(function, arguments, str(log), str(self.values), leads)
        )
        self.began = time.monotonic()
        made.start()
        self.process: Any = made

    @property
    def left(self) -> float:
        """Seconds."""
        return self.began + self.limit - time.monotonic()

    @property
    def done(self) -> bool:
        """It has ended by itself: its sentinel is there a moment before the exit code."""
        return bool(wait([self.process.sentinel], 0))

    @staticmethod
    def wait_for(processes: list[Process], seconds: float) -> None:
        """Until one of them ends, or so many seconds."""
        wait([process.process.sentinel for process in processes], seconds)

    def end(self) -> str:
        """Kill it if it still runs; how it ended, empty if well."""
        over = not self.done
        if over:
            os.killpg(self.process.pid, signal.SIGKILL) if self.leads else self.process.kill()
        self.process.join()
        if self.leads:  # what it has left behind
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.exitcode
        if over:
            return f"{NOT_DONE} {self.limit:.0f} s"
        if code == 0:
            return ""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "; ".join([how, *lines])

    def read(self) -> list[Any]:
        """What it has yielded so far."""
        if not self.values.exists():
            return []
        lines = self.values.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def call(function: Callable[..., Any], *arguments: Any, limit: float, log: Path) -> Any:  # noqa: ANN401  any JSON value
    """What the function returns in a process of its own."""
    return next(values(_once, function, arguments, limit=limit, log=log))["value"]


def values(function: Callable[..., Iterator[Any]], *arguments: Any, limit: float, log: Path) -> Iterator[Any]:  # noqa: ANN401
    """What the function yields in a process of its own, also where that does not end well."""
    yield from all_values([Process(function, arguments, limit=limit, log=log)])[0]


def all_values(processes: list[Process]) -> list[Iterator[Any]]:
    """What each one yields, once all have ended."""
    while any(not process.done and process.left > 0 for process in processes):
        Process.wait_for([process for process in processes if not process.done], max(0.0, processes[0].left))
    return [_ended(process, process.end()) for process in processes]


def _ended(process: Process, trouble: str) -> Iterator[Any]:
    yield from process.read()
    if trouble:
        raise Failed(trouble)


def _once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    yield {"value": function(*arguments)}


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], log: str, values: str, leads: bool) -> None:
    """Its end is without destructors, which may wait for one another (docs/adr/0007)."""
    if leads:
        os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # else it would keep the GPU from the next command
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    code = 1
    try:
        with open(values, "w", buffering=1) as file:  # noqa: PTH123  line by line: it may be killed
            for value in function(*arguments):
                file.write(json.dumps(value) + "\n")
        code = 0
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
