"""A node's private folder of an attempt: locked while a process uses it, and cleared afterwards."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress

from dray.contract import files, node
from dray.contract.findings import UnfitError

_LOCK = "lock"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def take(folder: str) -> int:
    """Make the folder, or share it with another node on this machine. The returned open file holds the lock."""
    clear_left_over(*os.path.split(folder))
    while True:
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
        except FileExistsError:  # a file, or a link to nothing
            pass
        except OSError as error:
            problem = "the node's own folder cannot be created"
            raise UnfitError(problem, where=folder, found=error.strerror) from error
        if others := files.open_to_others(folder, folder=True):
            raise UnfitError(
                "the node's own folder is not private",
                where=folder,
                wanted=f"a folder of user {os.geteuid()} that no other user may write",
                found=others,
                fix="start the run again: it gets another folder",
            )
        lock = os.open(f"{folder}/{_LOCK}", os.O_CREAT | _FLAGS, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)  # cleared just before it was held


def clear_left_over(parent: str, own: str = "") -> list[str]:
    """Remove the folders of this user's killed runs, whose lock nobody holds."""
    removed = []
    for folder in left_over(parent, own):
        import shutil  # noqa: PLC0415  3 ms, for what is rarely there

        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return removed


def left_over(parent: str, own: str = "") -> Iterator[str]:
    """Left-over folders; each is locked until the next one is requested."""
    for name in os.listdir(parent):
        folder = f"{parent}/{name}"
        if name == own or not name.startswith(f"dray-{os.geteuid()}-"):
            continue
        try:
            if files.open_to_others(folder, folder=True):
                continue
            lock = os.open(f"{folder}/{_LOCK}", _FLAGS)
        except OSError:  # made or removed a moment ago
            continue
        if _is_free(lock):
            yield folder
        os.close(lock)


def held(folder: object) -> bool | None:
    """Whether a runner of this user holds the folder that a plan names; None if it is not on this machine."""
    if not isinstance(folder, str) or not folder.startswith(f"{node.OWN}{os.geteuid()}-") or folder.count("/") > 2:
        return None
    try:
        lock = os.open(f"{folder}/{_LOCK}", _FLAGS)
    except (OSError, ValueError):
        return None
    is_free = _is_free(lock)
    os.close(lock)
    return not is_free


def _is_free(lock: int) -> bool:
    """Whether nobody has the lock; this process has it then."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
