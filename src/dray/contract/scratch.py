"""A node's private folder of an attempt: locked while a process uses it, and cleared afterwards."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator

from dray.contract import node
from dray.contract.findings import UnfitError

_LOCK = "lock"


def take(folder: str) -> int:
    """Make the folder, or share it with another node on this machine. The returned open file holds the lock."""
    clear_left_over(*os.path.split(folder))
    while True:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass  # another node of this machine made it, or another user
        except OSError as error:
            problem = "the node's own folder cannot be created"
            raise UnfitError(problem, where=folder, found=error.strerror or str(error)) from error
        if not _ours(folder):
            raise UnfitError(
                "the node's own folder is not private",
                where=folder,
                wanted=f"a folder of user {os.geteuid()} that no other user may read",
                found=_seen(folder),
                fix="start the run again: it gets another folder",
            )
        lock = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
        if name == own or not name.startswith(f"dray-{os.geteuid()}-") or not _ours(folder):
            continue
        try:
            lock = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # made a moment ago
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            yield folder
        finally:
            os.close(lock)


def held(folder: object) -> bool | None:
    """Whether a runner of this user holds the folder that a plan names; None if it is not on this machine."""
    if not isinstance(folder, str) or not folder.startswith(f"{node.OWN}{os.geteuid()}-") or folder.count("/") > 2:
        return None
    try:
        lock = os.open(f"{folder}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _ours(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _seen(folder: str) -> str:
    found = os.lstat(folder)
    kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no folder"
    return f"{kind} of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
