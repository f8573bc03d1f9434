"""Removes locks that a killed compiler has left: a rank would wait for one for ever, without a message."""

from __future__ import annotations

import glob
import os
import time
from contextlib import suppress

# torch holds a lock while it compiles one extension, which takes minutes at the most.
_STALE_S = 15 * 60.0


def clear(folder: str, since: float | None = None) -> None:
    """Remove locks of torch's extensions: stale ones, or those from before `since`, when other ranks have ended."""
    before = time.time() - _STALE_S if since is None else since
    for path in glob.glob(f"{glob.escape(folder)}/**/lock", recursive=True):
        with suppress(OSError):  # another node was faster
            made = os.stat(path).st_mtime
            if made < before:
                os.unlink(path)
                minutes = (time.time() - made) / 60
                print(f"dray: removed {path}, a lock {minutes:.0f} minutes old: its compiler was killed", flush=True)
