"""Check a disk for room before a save, and tell errors that may pass from others."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dray.contract.findings import DrayError, UnfitError
from dray.contract.unexpected import MENDED

_MORE = 1 << 20  # bytes beside the tensors: the manifest


def failed(error: BaseException, folder: Path, newest: str) -> DrayError:
    """The checkpoint's failure; UnfitError (69) where the run may go on until the disk is mended."""
    mended = isinstance(error, OSError) and error.errno in MENDED
    found = " ".join(str(error).split())[-300:] or type(error).__name__
    if mended and isinstance(error, OSError) and error.errno != errno.EIO:
        found = error.strerror or found
    return (UnfitError if mended else DrayError)(
        "the checkpoint cannot be written",
        wanted=f"room and permission to write in {folder}",
        found=found,
        fix=f"check the disk and its quota; {newest}",
    )


def require_room(folder: Path, size: int, newest: str) -> None:
    """Refuse if the disk lacks room for `size` bytes; a quota shows only while writing."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < size + _MORE:  # some file systems do not tell
        raise UnfitError(
            "the checkpoint does not fit on the disk",
            where=folder,
            wanted=f"{size / 1e9:.4g} GB",
            found=f"{os.strerror(errno.ENOSPC)} ({free / 1e9:.4g} GB free, {size / 1e9:.4g} GB needed)",
            fix=f"make room on that disk; {newest}",
        )
