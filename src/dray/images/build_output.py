"""A build's output: all of it in a log file, each step's line on the terminal, the last lines in an error."""

from __future__ import annotations

import errno
import fcntl
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from dray import interrupts
from dray.clients import progress
from dray.clients.builder import BuildError
from dray.clients.progress import Say
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError, UnfitError

# dray's own lines, and Docker's on the steps of the builder's image.
_SHOWN = re.compile(r"dray: |Step \d+/\d+ : ")
_WIDTH = 120
_SILENCE_S = 30.0
_FULL = "no space left on device"  # programs write No, Docker no


@contextmanager
def build_log(path: Path, *, out: Path | None = None) -> Iterator[Say]:
    """Yield the function that logs a line. If a program of the build fails, the error gets its last lines and the log.

    `out` is the folder of the image, which the build writes besides its own folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    build = path.parent.parent
    last: deque[str] = deque(maxlen=15)
    with path.open("a", encoding="utf-8") as file:
        try:
            # Two builds of one image would overwrite each other's folder of inputs.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DrayError(
                "another build of this image is running", where=path, fix="wait for it, or end it"
            ) from None
        file.truncate(0)

        lock = Lock()
        shown, shown_at = "the build", time.monotonic()

        def line(text: str) -> None:
            nonlocal shown, shown_at
            text = printable(text)  # a base's own programs may write here
            with lock:
                print(text, file=file, flush=True)
                last.append(text)
                if _SHOWN.match(text):
                    shown, shown_at = text[:_WIDTH], time.monotonic()
                    print(text if text.startswith("dray: ") else shown, file=sys.stderr, flush=True)

        def tell() -> None:
            with lock:
                seconds = time.monotonic() - shown_at
                if seconds >= _SILENCE_S:
                    print(f"dray: {seconds:.0f} s since: {shown.removeprefix('dray: ')}", file=sys.stderr, flush=True)

        try:
            with interrupts.stoppable(), progress.every(_SILENCE_S, tell):
                yield line
        except DrayError as error:
            text = "\n".join(last)
            if _FULL in f"{text}\n{error.details.get('found')}".lower():
                raise _disk_full(build, [build, out or build]) from error
            # dray's own errors need no log; a program's reason is in the log.
            if text and isinstance(error, BuildError):
                error.amend(where=path, found=text)
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            written = error.filename2 or error.filename  # a copy names two files, and writes the second
            raise _disk_full(build, [Path(written)] if written else [build, out or build]) from error


def _disk_full(build: Path, written: list[Path]) -> UnfitError:
    """The error of a full disk. Programs do not name the disk: dray takes the one with the least free space."""
    folders = [_that_is_left(path) for path in written]
    full = min(folders, key=lambda folder: shutil.disk_usage(folder).free)
    ours = build.stat().st_dev == full.stat().st_dev
    return UnfitError(
        "the disk is full",
        where=full,
        found=f"{shutil.disk_usage(full).free / 1e9:.1f} GB free; dray doctor --build VARIANT shows what a build needs",
        fix=f"make room; {build} can be removed: it holds fetched files and built images" if ours else "make room",
    )


def _that_is_left(path: Path) -> Path:
    """The nearest folder that exists: a failed build removes some of its own."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
