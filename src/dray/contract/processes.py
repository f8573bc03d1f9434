"""Identify a process, so that a later one with the same id is not taken for it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from dray.contract.node import proc_text
from dray.contract.start_times import BOOT_ID


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
