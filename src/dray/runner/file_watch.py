"""Looks at files of the shared disk in a thread: while the disk stalls, signals, messages and hangs are still seen."""

from __future__ import annotations

import _thread  # nobody waits for this thread, and threading's import is paid by every start
import os
import time
from contextlib import suppress

from dray.contract import files

_LOOK_S = 1.0
_STALL_S = 5.0  # from one look to the next, after which the disk stalls
_LONGEST = 1 << 16  # bytes of the file by which a run is asked to end


class FileWatch:
    """The last look at the file by which a run is asked to end, and at the sizes of others."""

    def __init__(self, stop: str = "") -> None:
        self.stop_lines: list[bytes] = []
        """The lines of the file `stop`; none without one."""
        self._stop = stop
        self._sizes: dict[str, int] = {}
        self._looked = time.monotonic()
        _thread.start_new_thread(self._look, ())

    def size(self, path: str) -> int:
        """The size of this file when it was last seen, 0 before that.

        While the disk stalls it may grow unseen: another number each time.
        """
        size = self._sizes.setdefault(path, 0)
        return size if time.monotonic() < self._looked + _STALL_S else -time.monotonic_ns()

    def _look(self) -> None:
        while True:
            with suppress(OSError):  # a disk that does not answer asks for nothing
                self.stop_lines = files.read(self._stop, limit=_LONGEST).splitlines()
            for path in list(self._sizes):
                with suppress(OSError):
                    self._sizes[path] = os.stat(path).st_size
            self._looked = time.monotonic()
            time.sleep(_LOOK_S)
