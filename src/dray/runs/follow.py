"""Files of a run, followed while they grow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from dray.contract import files

_MARK = 64  # bytes before the place, by which a file is known that was written anew


class Growing:
    """A file that grows, and may not be there yet; `position` is where the last reading ended."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path, self.position = path, position
        self.again = 0
        """How often it was read from its beginning once more."""
        self._file: tuple[int, int] | None = None
        self._mark = b""

    def open(self) -> BufferedReader:
        """At the place where the last reading ended; at the beginning of another file of that name, or of one that was
        cut or written anew. OSError as of a file that is read whole."""
        file = files.open_regular(self.path)
        try:
            found = os.fstat(file.fileno())
            this = (found.st_dev, found.st_ino)
            same = self._file in (None, this) and self.position <= found.st_size
            if same and self._mark:
                file.seek(self.position - len(self._mark))
                same = file.read(len(self._mark)) == self._mark
            if not same:
                self.position, self._mark, self.again = 0, b"", self.again + 1
            self._file = this
            file.seek(self.position)
        except BaseException:
            file.close()
            raise
        return file

    def lines(self, longest: int, *, whole: bool = False) -> Iterator[bytes]:
        """Those that are new. One without its end is left for the next time, unless that is the `whole` file; one that
        is longer comes in pieces."""
        with self.open() as file:
            while line := file.readline(longest):
                if not line.endswith(b"\n") and len(line) < longest and not whole:
                    return
                self._passed(line)
                yield line

    def _passed(self, data: bytes) -> None:
        self.position += len(data)
        self._mark = data[-_MARK:]

    def read(self) -> bytes:
        """What has come since the last time."""
        try:
            with self.open() as file:
                new = file.read()
        except FileNotFoundError:
            return b""
        if new:
            self._passed(new)
        return new


class Output:
    """What a rank prints, byte for byte: a program may draw a bar of its own."""

    def __init__(self, log: Path) -> None:
        self._file, self._last = Growing(log), b"\n"
        self.empty = True

    def look(self) -> None:
        """Show what has come since the last look."""
        new = self._file.read()
        if new:
            self._last, self.empty = new[-1:], False
            sys.stdout.flush()
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()

    def close(self) -> None:
        """Leave the terminal at the beginning of a line."""
        if self._last != b"\n":
            self._last = b"\n"
            print(flush=True)
