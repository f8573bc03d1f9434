"""A run is asked to save and end: SIGUSR1 for the processes that handle it, and for no others, which it would kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


class Asked:
    """Who has been told, each once."""

    def __init__(self) -> None:
        self.told: set[int] = set()

    def tell(self, parents: Iterable[int]) -> None:
        """Those among these processes and below them that handle it; what is below one that does, it tells itself."""
        for process in parents:
            if not handles(process, signal.SIGUSR1):
                self.tell(below(process))
            elif process not in self.told:
                self.told.add(process)
                os.kill(process, signal.SIGUSR1)


def handles(process: int, number: int) -> bool:
    """Whether it has a handler for this signal."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            caught = next((line for line in file if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    except OSError:  # it has ended
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def below(process: int) -> list[int]:
    """Its children; each thread has its own."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended; or a kernel without CONFIG_PROC_CHILDREN
        pass
    return found
