"""The cached tokens of datasets on this machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dray.contract.files import read

_TOKENS = re.compile(r"[0-9a-f]{24}(\.part-[0-9a-f]{16})?")
_DAY = 86400
_WRITES = 3600  # seconds within which a run that makes tokens writes again


class Entry(NamedTuple):
    """The cached tokens of one dataset."""

    folder: Path
    dataset: str
    unused: float
    """Days since a run read or wrote them."""

    @property
    def made_now(self) -> bool:
        """Whether a run may still be writing the tokens."""
        return ".part-" in self.folder.name and self.unused * _DAY < _WRITES


def entries(cache: Path) -> Iterator[Entry]:
    """All entries of a cache, with unfinished ones."""
    for folder in cache.iterdir() if cache.is_dir() else ():
        if not _TOKENS.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        used = max((path.lstat().st_mtime for path in folder.iterdir()), default=folder.stat().st_mtime)
        try:
            dataset = str(json.loads(read(folder / "manifest.json"))["dataset"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            dataset = "(incomplete)"
        yield Entry(folder, dataset, (time.time() - used) / _DAY)
