"""A build's output: all of it in a file, the steps' lines for the user, the last lines for an error."""

from __future__ import annotations

import errno
import fcntl
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from dray import process
from dray.errors import DrayError, UnfitError
from dray.images.builder import BuildError

_SHOWN = ("dray: ", "Downloading ")
_FULL = "no space left on device"  # programs write No, Docker no


class BuildLog:
    """Takes a build's lines one at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        try:
            # Two builds of one image would pull the folder of inputs from under each other.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise DrayError(
                "another build of this image is running", where=path, fix="wait for it, or end it"
            ) from None
        self._file.truncate(0)
        self._last: deque[str] = deque(maxlen=15)

    def __enter__(self) -> BuildLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def line(self, text: str) -> None:
        """One line of output, without its line end."""
        print(text, file=self._file, flush=True)
        self._last.append(text)
        if text.startswith(_SHOWN):
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def explaining(self, *, out: Path | None = None) -> Iterator[None]:
        """An error that says nothing of its cause gets the last lines, and the place of all of them.

        `out` is the folder that is written besides the build's own.
        """
        build = self.path.parent.parent
        try:
            with process.stoppable():
                yield
        except DrayError as error:
            said = "\n".join(self._last)
            if _FULL in f"{said}\n{error.details.get('found')}".lower():
                raise _disk_full(build, [build, out or build]) from error
            # What dray itself says needs no log; what a program said is in it.
            if said and isinstance(error, BuildError):
                error.details |= {"where": str(self.path), "found": said}
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            written = error.filename2 or error.filename  # a copy names two files, and writes the second
            raise _disk_full(build, [Path(written)] if written else [build, out or build]) from error


def _disk_full(build: Path, written: list[Path]) -> UnfitError:
    """Programs do not say which of the disks that they write is full: it is the one with the least room."""
    folders = [_that_is_left(path) for path in written]
    full = min(folders, key=lambda folder: shutil.disk_usage(folder).free)
    ours = build.stat().st_dev == full.stat().st_dev
    return UnfitError(
        "the disk is full",
        where=full,
        found=f"{shutil.disk_usage(full).free / 1e9:.1f} GB free; a build takes four times the unpacked image",
        fix=f"make room; {build} may be removed whole: it holds what was fetched and built" if ours else "make room",
    )


def _that_is_left(path: Path) -> Path:
    """The folder of a file: a build that has failed has removed some of its own."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
