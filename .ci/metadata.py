"""Check what an index would check of a wheel and a source distribution, without one."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

NEEDED = ("summary", "description", "requires_python", "license_expression")


def read(path: Path) -> bytes:
    """The metadata in a distribution."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")))
    with tarfile.open(path) as source:
        member = source.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        return member.read()


for path in map(Path, sys.argv[1:]):
    about = Metadata.from_email(read(path), validate=True)
    missing = [field for field in NEEDED if not getattr(about, field)]
    if missing:
        sys.exit(f"dray: {path.name} lacks metadata: {', '.join(missing)}")
    print(f"{path.name}: {about.name} {about.version}, Python {about.requires_python}")
