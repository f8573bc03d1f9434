"""Follow a run's files while they grow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from dray.contract import files


class Growing:
    """A growing file, which may not exist yet; `position` is where the last read ended."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path, self.position = path, position
        self.again = 0
        """How often reading started again from the beginning."""
        self._file: tuple[int, int] | None = None

    def open(self) -> BufferedReader:
        """Open the file at the last position; at 0 if it was replaced or truncated. May raise OSError."""
        file = files.open_regular(self.path)
        found = os.fstat(file.fileno())
        this = (found.st_dev, found.st_ino)
        if self._file not in (None, this) or self.position > found.st_size:
            self.position, self.again = 0, self.again + 1
        self._file = this
        file.seek(self.position)
        return file

    def lines(self, longest: int, *, whole: bool = False) -> Iterator[bytes]:
        """New lines. An unfinished last line waits for the next call, unless this is the `whole` file; lines above
        `longest` bytes come in pieces."""
        with self.open() as file:
            while line := file.readline(longest):
                if not line.endswith(b"\n") and len(line) < longest and not whole:
                    return
                self.position += len(line)
                yield line

    def read(self) -> bytes:
        """The bytes that are new since the last call."""
        try:
            with self.open() as file:
                new = file.read()
        except FileNotFoundError:
            return b""
        self.position += len(new)
        return new


class Output:
    """Shows a rank's output unchanged, with its progress bars."""

    def __init__(self, log: Path) -> None:
        self._file, self._last = Growing(log), b"\n"
        self.empty = True

    def look(self) -> None:
        """Print the output that is new since the last call."""
        if new := self._file.read():
            self._last, self.empty = new[-1:], False
            sys.stdout.flush()
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()

    def close(self) -> None:
        """End the last line."""
        if self._last != b"\n":
            self._last = b"\n"
            print(flush=True)
