"""Processes: the identity of one, so that a later one with its id is not taken for it, and what this one prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dray.contract.node import proc_text
from dray.contract.node_start import BOOT_ID


def mark(pid: int) -> list[Any]:
    """A process's identity: boot id, pid namespace, pid and start time."""
    namespace = ""
    with suppress(OSError):  # a container that hides it; then nobody knows when this process has ended
        namespace = os.readlink("/proc/self/ns/pid")
    return [proc_text(BOOT_ID).strip(), namespace, pid, began(pid)]


def began(pid: int) -> str:
    """The process's start time; empty if it has ended, or is a zombie."""
    state, *fields = proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["X"]
    return "" if state in "ZX" else fields[18]


def here(process: list[Any]) -> bool:
    """Whether this machine and pid namespace can see the process."""
    boot, namespace, _, began_at = process
    return bool(boot and namespace and began_at) and mark(os.getpid())[:2] == [boot, namespace]


def gone(process: list[Any]) -> bool:
    """Whether the process has certainly ended."""
    return here(process) and began(process[2]) != process[3]


@contextmanager
def unprinted() -> Iterator[None]:
    """Hide all that this process prints to stdout meanwhile, also of C++ code."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
