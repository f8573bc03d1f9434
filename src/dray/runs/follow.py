"""Files of a run, followed while they grow."""

from __future__ import annotations

import sys
from pathlib import Path

from dray.contract import files


class Growing:
    """A file that grows, and may not be there yet."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path, self._position = path, position

    def read(self) -> bytes:
        """What has come since the last time."""
        try:
            with files.open_regular(self._path) as file:
                file.seek(self._position)
                new = file.read()
        except FileNotFoundError:
            return b""
        self._position += len(new)
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
