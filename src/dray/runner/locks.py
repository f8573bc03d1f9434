"""Removes locks that a killed compiler has left: a rank would wait for one for ever, without a message."""

from __future__ import annotations

import glob
import os
import time

# torch holds a lock while it compiles one extension, which takes minutes at the most.
_STALE_S = 15 * 60.0


def clear(folder: str, since: float | None = None) -> None:
    """Remove locks of torch's extensions: stale ones, and those from before `since`, when other ranks have ended."""
    if not folder:
        return
    for path in glob.glob(f"{glob.escape(folder)}/**/lock", recursive=True):
        try:
            made = os.stat(path).st_mtime
            age = time.time() - made
            if age > _STALE_S or (since is not None and made < since):
                os.unlink(path)
                print(f"dray: removed {path}, a lock {age / 60:.0f} minutes old: its compiler was killed", flush=True)
        except OSError:  # another node was faster
            continue
