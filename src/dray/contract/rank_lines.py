"""A node's log that has the lines of its ranks too, each with `rank 3 | ` before it.

Runs of many ranks have no file for each of them: a shared disk makes some thousand files a second.
"""

from __future__ import annotations

import os
import re

from dray.contract import files

VARIABLE = "DRAY_NODE_LOG"
"""The variable with that log's path, for the ranks' supervisors; unset where each rank has its own log."""
_LINE = re.compile(rb"rank (\d{1,7}) \| ")
_WINDOWS = (1 << 16, 1 << 20, 1 << 24)  # bytes from the end: other ranks may have written much since


def prefix(rank: int | str) -> bytes:
    """The prefix of each line of a rank."""
    return f"rank {rank} | ".encode()


def split(line: bytes) -> tuple[int | None, bytes]:
    """The rank of a line, and the line; None for the runner's and the launcher's lines."""
    found = _LINE.match(line)
    return (int(found[1]), line[found.end() :]) if found else (None, line)


def tail(log: str | os.PathLike[str], rank: int | None, lines: int = 20) -> list[str]:
    """The last lines of a rank in its node's log; with None, of a log without prefixes."""
    if rank is None:
        return files.tail(log, lines)
    found: list[str] = []
    for window in _WINDOWS:
        text, whole = _end(log, window)
        every = text.split(b"\n") if whole else text.split(b"\n")[1:]  # the first one may be a part
        own = [line[len(before) :] for line in every if line.startswith(before := prefix(rank))]
        found = [line.decode("utf-8", "replace") for line in own[-lines:]]
        if whole or len(found) == lines:
            break
    return found


def _end(log: str | os.PathLike[str], size: int) -> tuple[bytes, bool]:
    """At most so many bytes, and whether that is all; nothing where there is no log."""
    try:
        with files.open_regular(log) as file:
            left = os.fstat(file.fileno()).st_size
            file.seek(max(0, left - size))
            return file.read(size), left <= size
    except OSError:
        return b"", True
