"""Fetch what an image is made from: wheels, source archives, Debian's packages, the base."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """The digest of a file, as locks have it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
