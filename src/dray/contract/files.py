"""Files that somebody else wrote, read without surprises; files of ours, complete or not there; the ends of logs."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_LIMIT = 16 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO, not a file",
    stat.S_IFCHR: "a device, not a file",
    stat.S_IFBLK: "a device, not a file",
}


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A file to read; OSError says so where it is none: opening a FIFO waits for ever, and a device has no end."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # NUL or a lone surrogate
        raise OSError(errno.EINVAL, "no path of a file", os.fspath(path)) from None
    except OSError as refused:
        if refused.errno == errno.ENXIO:
            refused.strerror = "a socket, not a file"
        raise
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise OSError(errno.EINVAL, _KINDS.get(kind, "not a file"), os.fspath(path))
    return open(handle, "rb")


def read(path: str | os.PathLike[str], *, limit: int = _LIMIT) -> bytes:
    """The content of a file of at most so many bytes; OSError says what is wrong with it."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", os.fspath(path))
    return content


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


def is_own(path: str | os.PathLike[str]) -> bool:
    """Whether this user or root decides what is there: no other user owns it, and not everybody may write to it."""
    found = os.stat(path)
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & stat.S_IWOTH


def tail(path: str | os.PathLike[str], lines: int = 20) -> list[str]:
    """The last lines of a log; none where there is no log."""
    try:
        with open_regular(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 16384))
            return log.read().decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []
