"""DeepSpeed's wheel, whose operators take minutes to compile. dray keeps it by the digest of its inputs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.contract.files import open_to_others

_SUM = "SHA256SUM"


def find(checkout: Path, key: str, *, say: Callable[[str], None]) -> Path | None:
    """The folder with the wheel of this digest. A wheel that is damaged, or that others could change, is removed."""
    folder = _folder(checkout, key)
    if not os.path.lexists(folder):
        return None
    problem = _problem(folder)
    if problem:
        say(f"dray: compile DeepSpeed's operators again: {folder} {problem}")
        shutil.rmtree(folder, ignore_errors=True)
    return None if problem else folder


def keep(checkout: Path, key: str, made: Path) -> None:
    """Keep the wheel that a build has left in `made`, if it compiled one."""
    folder = _folder(checkout, key)
    wheel = next(made.glob("*.whl"), None)
    if wheel is None or os.path.lexists(folder):
        return
    folder.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        new = Path(scratch) / key
        new.mkdir()
        shutil.copyfile(wheel, new / wheel.name)
        (new / _SUM).write_text(_digest(new / wheel.name))
        # Not as the umask says: `find` refuses what others may write.
        for path in new.iterdir():
            path.chmod(0o644)
        new.chmod(0o755)
        new.replace(folder)


def _folder(checkout: Path, key: str) -> Path:
    return checkout / "build" / "operators" / key


def _problem(folder: Path) -> str | None:
    try:
        (wheel,) = folder.glob("*.whl")
        for path in (folder, wheel, folder / _SUM):
            if trouble := open_to_others(path, folder=path == folder):
                return f"is {trouble}"
        return None if (folder / _SUM).read_text() == _digest(wheel) else "does not match its checksum"
    except (OSError, ValueError):
        return "is incomplete"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
