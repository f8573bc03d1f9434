"""Files that are complete or not there at all, and the ends of logs."""

from __future__ import annotations

import os


def write_atomic(path: str | os.PathLike[str], content: str | bytes, *, mode: int = 0o666) -> None:
    """Write to a file beside it, bring it to the disk, then rename: a reader sees the old content or the new one."""
    target = os.fspath(path)
    part = f"{target}.part-{os.getpid()}"
    data = content.encode() if isinstance(content, str) else content
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with open(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise


def tail(path: str | os.PathLike[str], lines: int = 20) -> list[str]:
    """The last lines of a log; none where there is no log."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 16384))
            return log.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []
