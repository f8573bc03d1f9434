"""Functions in processes of their own: one that crashes or hangs is a result, and not the end.

They are forked from a process that has imported torch and done nothing with it, which saves ten seconds each; where
that process has touched the GPU none of its forks could, and new processes are started in their place.
"""

from __future__ import annotations

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

    def end(self) -> str:
        """Kill it if it still runs; how it ended, empty if well."""
        over = not wait([self.process.sentinel], 0)  # which is there a moment before the exit code
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
    process = Process(_once, (function, arguments), limit=limit, log=log)
    wait([process.process.sentinel], limit)
    if trouble := process.end():
        raise Failed(trouble)
    return process.read()[-1]["value"]


def all_of(todo: list[Callable[[], Process]], at_once: int, deadline: float) -> Iterator[Process | None]:
    """Each process as it ends; None for one that there was no time left for."""
    running: list[Process] = []
    while todo or running:
        while todo and len(running) < at_once:
            if time.monotonic() > deadline:
                todo.pop(0)
                yield None
                continue
            running.append(todo.pop(0)())
        if not running:
            continue
        first = min(*(one.left for one in running), deadline - time.monotonic())
        wait([one.process.sentinel for one in running], max(0.0, first))
        late = time.monotonic() >= deadline
        for one in [one for one in running if late or one.left <= 0 or wait([one.process.sentinel], 0)]:
            running.remove(one)
            yield one


def _once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Any]:
    yield {"value": function(*arguments)}


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], log: str, values: str, leads: bool) -> None:
    """Its end is without destructors, which may wait for one another (docs/adr/0007)."""
    if leads:
        os.setsid()
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
