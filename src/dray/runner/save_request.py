"""Asks a run to save and end: SIGUSR1 goes only to processes that handle it, since it would kill the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


class SaveRequest:
    """The processes that have been asked, each once."""

    def __init__(self) -> None:
        self.told: set[int] = set()

    def tell(self, parents: Iterable[int]) -> None:
        """Signal each process that handles SIGUSR1, and leave its children to it; else go on with its children."""
        for process in parents:
            if not handles(process, signal.SIGUSR1):
                self.tell(below(process))
            elif process not in self.told:
                self.told.add(process)
                os.kill(process, signal.SIGUSR1)


def handles(process: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            caught = next((line for line in file if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    except OSError:  # it has ended
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def below(process: int) -> list[int]:
    """The children of all the process's threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended; or a kernel without CONFIG_PROC_CHILDREN
        pass
    return found
