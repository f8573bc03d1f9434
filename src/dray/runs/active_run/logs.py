"""Read a run's logs and metrics, also while they grow."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from dray.contract import files
from dray.runs.store import RunPaths

_LONGEST = 1 << 16  # bytes of a line; a longer one comes in pieces
_NAME = re.compile(r"(node|rank|job)-(([0-9]{1,18})(?:_[0-9]{1,18})?)\.log")


class Growing:
    """A growing file, which may not exist yet; `position` is where the last read ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._inode = 0

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open the file at the last position; at 0 if it was replaced or truncated. May raise OSError."""
        with files.open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            if self._inode not in (0, status.st_ino) or self.position > status.st_size:
                self.position = 0
            self._inode = status.st_ino
            file.seek(self.position)
            yield file

    def lines(self, longest: int = _LONGEST, *, whole: bool = False) -> Iterator[bytes]:
        """New lines; an unfinished last line waits for the next call, unless this is the `whole` file."""
        with self.open() as file:
            while line := file.readline(longest):
                if not line.endswith(b"\n") and len(line) < longest and not whole:
                    return
                self.position += len(line)
                yield line


class Log(Growing):
    """The log of a node, a rank or a job."""

    def __init__(self, path: Path, kind: str, name: str, number: int) -> None:
        super().__init__(path)
        self.kind, self.number = kind, number
        self.label = f"{kind} {name}"

    def new(self, *, whole: bool = False) -> Iterator[bytes]:
        """New lines, without their ends; an unfinished last line only of the `whole` file."""
        try:
            # First stat: opening a thousand logs five times a second would load a shared disk.
            if whole or self.path.stat().st_size != self.position:
                for line in self.lines(whole=whole):
                    yield line.rstrip(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:  # the other logs are still shown
            if whole:
                yield f"dray: this log cannot be read: {error.strerror}".encode()


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


def of(paths: RunPaths, *, node: int | None = None, rank: int | None = None, each: int = 1) -> list[Log]:
    """The logs of an attempt, nodes first; or of one rank, or of one node with its ranks. `each`: ranks per node."""
    found = []
    for log in in_folder(paths.logs):
        on = log.number // each if log.kind == "rank" else log.number
        if node in (None, on) and (rank is None or (log.kind, log.number) == ("rank", rank)):
            found.append(log)
    return found


def in_folder(folder: Path) -> list[Log]:
    """All logs in a folder; in the run's own are those of its submitted jobs, its only output before an attempt."""
    found = []
    for path in folder.glob("*.log"):
        if name := _NAME.fullmatch(path.name):
            found.append(Log(path, name[1], name[2], int(name[3])))
    return sorted(found, key=lambda log: (log.kind, log.number))
