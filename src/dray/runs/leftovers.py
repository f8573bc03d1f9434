"""Other items on the disk: staged images, layers, and files of failed builds."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import run_folder

DAY = 86400.0
_TEMPORARY = re.compile(r"\.(dray-[a-z0-9._-]+|debs|lock|pull|wheels)-[a-z0-9_]{8}")
_LAYER = re.compile(r"dray-[a-z0-9_]+-[a-z0-9._-]+\.sif")


class Item(NamedTuple):
    """A file or folder that dray may remove."""

    kind: str
    path: Path
    size: int
    """Bytes that would be freed, or of the whole item if it is kept."""
    age: float
    """Days since anything in it changed, or was used."""
    holds: str
    parts: tuple[Path, ...] = ()
    """The parts that would be removed; empty if it is kept."""
    kept: str = ""
    """Why it is kept."""
    whole: int = 0
    changed: float = 0.0
    lock: Path | None = None
    """A process that holds this lock uses the item."""

    def stays(self, why: str) -> Item:
        """The same item, marked as kept."""
        return self._replace(parts=(), kept=why, size=self.whole)

    def data(self) -> dict[str, object]:
        """For JSON."""
        shown = {"kind": self.kind, "path": str(self.path), "bytes": self.size, "days": round(self.age, 2)}
        return {**shown, "holds": self.holds, "removes": [str(part) for part in self.parts], "kept": self.kept}


def measured(path: Path) -> tuple[int, float]:
    """Bytes on the disk, and the time of the last change; links are not followed."""
    found = path.lstat()
    size, changed = found.st_blocks * 512, found.st_mtime
    if not stat.S_ISDIR(found.st_mode):
        return size, changed
    folders = [path]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    about = entry.stat(follow_symlinks=False)
                    size, changed = size + about.st_blocks * 512, max(changed, about.st_mtime)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
        except OSError:  # an unreadable folder, or one that was removed
            continue
    return size, changed


def item(kind: str, path: Path, holds: str, *parts: Path, used: float = 0.0) -> Item:
    """An item with its size and age."""
    both = [measured(part) for part in parts or (path,)]
    whole, changed = measured(path)
    age = (time.time() - max(used, *(one[1] for one in both))) / DAY
    return Item(kind, path, sum(one[0] for one in both), age, holds, parts or (path,), whole=whole, changed=changed)


def own(path: Path, *, folder: bool) -> bool:
    """Whether it belongs to this user and is no link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    kind = stat.S_ISDIR if folder else stat.S_ISREG
    return kind(found.st_mode) and found.st_uid == os.geteuid()


def tables(runs: Path, file: str = run_folder.TUNE) -> list[Path]:
    """The folders with this file in them, such as those of `dray tune`."""
    with suppress(OSError):
        found = [path for path in runs.iterdir() if own(path, folder=True)]
        return sorted(path for path in found if own(path / file, folder=False))
    return []


def staged(folders: list[Path]) -> Iterator[Item]:
    """Copies of images on this node's disk that killed jobs left. A run that has started no longer needs its copy."""
    for folder in folders:
        for image in sorted(folder.glob(f"dray-{os.geteuid()}-*.sif")):
            if own(image, folder=False):
                found = item("staged", image, "an image's copy", used=image.stat().st_atime)
                yield found if found.age * 24 >= 1 else found.stays("a run may be about to start it")


def builds(build: Path | None) -> Iterator[Item]:
    """Folders that killed builds left, and folders that failed builds kept for inspection."""
    if build is None or not own(build, folder=True):
        return
    busy = any(_held(log) for log in (build / "logs").glob("*.log"))
    killed = [path for path in build.iterdir() if _TEMPORARY.fullmatch(path.name)]
    failed = list((build / "failed").iterdir()) if own(build / "failed", folder=True) else []
    for path in (one for one in (*killed, *failed) if own(one, folder=True)):
        found = item("builds", path, "left by a failed build" if path in failed else "left by a killed build")
        yield found.stays("a build is running") if busy else found


def layers(build: Path | None, *, waiting: bool) -> Iterator[Item]:
    """Layers with their records; the lock stays, so that the same bytes can be built again."""
    if build is None or not own(build, folder=True):
        return
    for sif in sorted(build.glob("dray-*.sif")):
        record = sif.with_name(f"{sif.name}.json")
        if not _LAYER.fullmatch(sif.name) or not own(sif, folder=False) or not sif.with_suffix(".lock").is_file():
            continue
        beside = [record] if own(record, folder=False) else []
        found = item("layers", sif, "a layer; its lock stays", sif, *beside, used=sif.stat().st_atime)
        yield found.stays("a job in the queue may need it") if waiting else found


@contextmanager
def taken(lock: Path | None) -> Iterator[bool]:
    """Hold the lock, if there is one; False if another process on this machine holds it."""
    with ExitStack() as stack:
        free = True
        try:
            if lock:
                handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except OSError:
            free = False
        yield free


def _held(lock: Path) -> bool:
    with taken(lock) as free:
        return not free
