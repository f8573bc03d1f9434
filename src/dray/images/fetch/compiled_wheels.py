"""DeepSpeed's wheel, whose operators take minutes to compile. dray keeps it by the digest of its inputs."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from dray.clients.progress import Say
from dray.contract.files import open_to_others


def find(checkout: Path, key: str, *, say: Say) -> Path | None:
    """The folder with the wheel of this digest. One that others could change, or that is damaged, is removed."""
    folder = _folder(checkout, key)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        return None
    # No lock has its hash.
    problem = open_to_others(folder, folder=True) or open_to_others(wheel) or _damage(wheel)
    if problem:
        say(f"dray: compile DeepSpeed's operators again: {folder} is {problem}")
        shutil.rmtree(folder, ignore_errors=True)
    return None if problem else folder


def _damage(wheel: Path) -> str:
    try:
        with ZipFile(wheel) as archive:
            bad = archive.testzip()
    except (BadZipFile, EOFError, zlib.error):
        bad = wheel.name
    return f"damaged: {bad}" if bad else ""


def keep(checkout: Path, key: str, made: Path) -> None:
    """Keep the wheel that a build has left in `made`, if it compiled one."""
    folder = _folder(checkout, key)
    wheel = next(made.glob("*.whl"), None)
    if wheel is None or made == folder:
        return
    folder.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
        new = Path(scratch) / key
        new.mkdir()
        shutil.copyfile(wheel, new / wheel.name)
        # Not as the umask says: `find` refuses what others may write.
        (new / wheel.name).chmod(0o644)
        new.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)


def _folder(checkout: Path, key: str) -> Path:
    return checkout / "build" / "operators" / key
