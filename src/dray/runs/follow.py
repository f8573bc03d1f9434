"""Files of a run, followed while they grow."""

from __future__ import annotations

import sys
from pathlib import Path

from dray.contract import files, rank_lines
from dray.runs.rank_log import RankLog


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
    """What a rank prints, byte for byte: a program may draw a bar of its own. Of its node's log, only its lines."""

    def __init__(self, log: RankLog) -> None:
        self._file, self._last = Growing(log.path), b"\n"
        self._before, self._part = b"" if log.rank is None else rank_lines.prefix(log.rank), b""
        self.empty = True

    def look(self) -> None:
        """Show what has come since the last look."""
        new = self._file.read()
        if self._before:
            *lines, self._part = (self._part + new).split(b"\n")
            own = (line for line in lines if line.startswith(self._before))
            new = b"".join(line[len(self._before) :] + b"\n" for line in own)
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
