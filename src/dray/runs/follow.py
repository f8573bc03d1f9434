"""Follow a run's files while they grow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from dray.contract import files


class Growing:
    """A growing file, which may not exist yet; `position` is where the last read ended."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path, self.position = path, position
        self.again = 0
        """How often reading started again from the beginning."""
        self._inode = 0

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open the file at the last position; at 0 if it was replaced or truncated. May raise OSError."""
        with files.open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            if self._inode not in (0, status.st_ino) or self.position > status.st_size:
                self.position, self.again = 0, self.again + 1
            self._inode = status.st_ino
            file.seek(self.position)
            yield file

    def lines(self, longest: int, *, whole: bool = False) -> Iterator[bytes]:
        """New lines. An unfinished last line waits for the next call, unless this is the `whole` file; lines above
        `longest` bytes come in pieces."""
        with self.open() as file:
            while line := file.readline(longest):
                if not line.endswith(b"\n") and len(line) < longest and not whole:
                    return
                self.position += len(line)
                yield line


class Output:
    """Shows a rank's output unchanged, with its progress bars."""

    def __init__(self, log: Path) -> None:
        self._file, self._last = Growing(log), b"\n"
        self.empty = True

    def look(self) -> None:
        """Print the output that is new since the last call."""
        with suppress(FileNotFoundError), self._file.open() as file:
            if new := file.read():
                self._file.position += len(new)
                self._last, self.empty = new[-1:], False
                sys.stdout.flush()
                sys.stdout.buffer.write(new)
                sys.stdout.buffer.flush()

    def close(self) -> None:
        """End the last line."""
        if self._last != b"\n":
            self._last = b"\n"
            print(flush=True)
