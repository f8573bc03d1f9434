"""Read files that others may have written, check who may write them, and write files atomically."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from typing import Any

from dray.contract.findings import ConfigError

AnyPath = str | os.PathLike[str]
DEPTH = 64
"""The deepest nesting of tables and lists; Python itself fails at some hundreds."""
_LIMIT = 16 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO, not a file",
    stat.S_IFCHR: "a device, not a file",
    stat.S_IFBLK: "a device, not a file",
}
_UTF8_MARK = b"\xef\xbb\xbf"
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: AnyPath, *, link: bool = True) -> BufferedReader:
    """Open a regular file; OSError for anything else: a FIFO would wait for ever, and a device has no end."""
    try:
        handle = os.open(path, _FLAGS if link else _FLAGS | os.O_NOFOLLOW)
    except ValueError:  # NUL or a lone surrogate
        raise OSError(errno.EINVAL, "not a path", os.fspath(path)) from None
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind == stat.S_IFREG:
        return open(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, _KINDS.get(kind, "not a file"), os.fspath(path))


def read(path: AnyPath, *, limit: int = _LIMIT, own: bool = False) -> bytes:
    """The content of a file of at most `limit` bytes; OSError says what is wrong with it.

    One that decides what runs is read as `own`: in a folder that a group may write, any of its users could have put
    another run in the place of this one.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if own and status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, f"a file of user {status.st_uid}", os.fspath(path))
        # For all that may come memory would be mapped and unmapped. /proc tells 0.
        content = file.read(min(limit + 1, status.st_size or limit))
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", os.fspath(path))
    return content


def end(path: AnyPath, most: int) -> tuple[bytes, bool]:
    """The last bytes of a file, and whether they are all of it; OSError as from `read`."""
    with open_regular(path) as file:
        begin = max(0, file.seek(0, os.SEEK_END) - most)
        return os.pread(file.fileno(), most, begin), not begin


def text(path: AnyPath, what: str, *, wanted: str = "", fix: str = "", limit: int = _LIMIT, own: bool = False) -> str:
    """The UTF-8 text of a user's file; `what` names the file in the ConfigError."""
    try:
        raw = read(path, limit=limit, own=own)
    except OSError as refused:
        problem = f"{what} cannot be read"
        raise ConfigError(problem, where=path, wanted=wanted, found=refused.strerror, fix=fix) from refused
    try:
        return raw.removeprefix(_UTF8_MARK).decode()  # some editors write the mark
    except UnicodeDecodeError as wrong:
        *before, row = wrong.object[: wrong.start].decode().split("\n")
        raise ConfigError(
            f"{what} is not UTF-8 text",
            where=f"{os.fspath(path)}:{len(before) + 1}:{len(row) + 1}",
            found=f"byte 0x{wrong.object[wrong.start]:02x}",
            fix="save the file as UTF-8",
        ) from wrong


def parse_json(content: str, what: str, where: object) -> Any:  # noqa: ANN401  any JSON value
    """The value of a JSON text; ConfigError if it is not valid, or if a key appears twice in a table."""
    place = str(where)
    try:
        value = json.loads(content, object_pairs_hook=_table)
        if _ESCAPED_SURROGATE.search(content):
            json.dumps(value, ensure_ascii=False).encode()
        if too_deep(value):
            raise RecursionError
    except json.JSONDecodeError as wrong:
        place, problem = f"{where}, line {wrong.lineno}, column {wrong.colno}", wrong.msg
    except RecursionError:
        problem = f"nested more than {DEPTH} levels deep"
    except ValueError as wrong:  # half of a surrogate pair, or thousands of digits
        problem = str(wrong)
    else:
        return value
    raise ConfigError(f"{what} is not valid JSON", where=place, found=problem)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON; ValueError if a key appears twice, of which readers take one or the other."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"a key appears twice: {twice[:80]}")
    return table


def too_deep(value: object, levels: int = DEPTH) -> bool:
    """Whether tables and lists are nested in more levels."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(too_deep(part, levels - 1) for part in inner)


def write_atomic(path: AnyPath, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write to a temporary file, fsync, then rename: a reader sees the old content or the new one."""
    with replacing(path, mode=mode) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: AnyPath, *, mode: int = 0o644, sync: bool = True) -> Iterator[BufferedWriter]:
    """As `write_atomic`, for content that comes in parts; if the block fails, nothing is replaced. Without `sync`, for
    what can be made again, the content may be gone after a power cut."""
    target = os.fspath(path)
    part = f"{target}.part-{os.getpid()}"
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with open(file, "wb") as stream:
            yield stream
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        os.replace(part, target)
    except BaseException as error:
        os.unlink(part)
        if isinstance(error, OSError):
            error.filename = target  # a write does not know it
        raise


def write_new(path: AnyPath, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a new file; if that fails, remove it again."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
        try:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
        except OSError:
            os.unlink(path)
            raise


def is_own(path: AnyPath) -> bool:
    """Whether it belongs to this user or root, and not everybody may write to it."""
    status = os.stat(path)
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH


def open_to_others(path: AnyPath, *, folder: bool = False) -> str:
    """Why a user other than this one and root could change it; empty if none could."""
    status, kind = os.lstat(path), "folder" if folder else "file"
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if stat.S_ISLNK(status.st_mode):
        return f"a link in place of a {kind}"
    if stat.S_IFMT(status.st_mode) != (stat.S_IFDIR if folder else stat.S_IFREG):
        return f"no {kind}"
    if status.st_uid not in (os.geteuid(), 0):
        return f"a {kind} of user {status.st_uid}, {mode}"
    return f"a {kind} that others may write, {mode}" if status.st_mode & 0o022 else ""


def tail(path: AnyPath, lines: int = 20) -> list[str]:
    """The last lines of a log; none if the log does not exist."""
    try:
        return end(path, 16384)[0].decode("utf-8", "replace").splitlines()[-lines:]
    except OSError:
        return []
