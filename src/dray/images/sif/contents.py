"""The files of a SIF, read from its squashfs without root and without starting it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.clients import builder
from dray.contract.findings import ConfigError, UnfitError
from dray.images.sif.format import Sif
from dray.process import Done

# -rw-r--r-- 0/0   1234 2026-01-31 12:00 squashfs-root/opt/dray/image.json
_FILE = re.compile(r"^-\S{9} \S+ +(\d+) \d{4}-\d\d-\d\d \d\d:\d\d squashfs-root/(.*)$", re.MULTILINE)
# The version of squashfs-tools that brought zstd and all options for listing and unpacking.
_OLDEST = (4, 4)
_NO_ZSTD = "unsupported by this version"


def sizes(sif: Sif) -> dict[str, int]:
    """The unpacked size of every file in bytes, by path."""
    done = _unsquashfs(sif, ["-lln"])
    return {path: int(size) for size, path in _FILE.findall(done.out)}


def file(sif: Sif, path: str) -> bytes | None:
    """The content of one file; None if it is missing, or a link."""
    with TemporaryDirectory(prefix="dray-") as scratch:
        # Only newer versions write a file to standard output; login nodes keep old ones for long.
        _unsquashfs(sif, ["-no-xattrs", "-dest", f"{scratch}/out"], [path], writes=Path(scratch))
        unpacked = Path(scratch) / "out" / path
        # A link would be read on this machine.
        return unpacked.read_bytes() if unpacked.is_file() and not unpacked.is_symlink() else None


def _unsquashfs(sif: Sif, options: Sequence[str], files: Sequence[str] = (), *, writes: Path | None = None) -> Done:
    binds = {sif.path: False, **({writes: True} if writes else {})}
    argv = ["unsquashfs", "-no-progress", "-offset", str(sif.system.offset), *options, str(sif.path), *files]
    done = builder.tool(argv, binds=binds)
    if done.code == 0:
        return done
    lines = (done.err or done.out).strip().splitlines()
    raise _unfit(lines) or ConfigError(
        "the image's files cannot be read",
        where=sif.path,
        found="\n".join(lines[-5:]),
        fix="build or copy the image again",
    )


def _unfit(lines: Sequence[str]) -> UnfitError | None:
    """The error if unsquashfs is too old: it prints only its options. None if the image itself is at fault."""
    shown = re.search(r"version (\d+)\.(\d+)\S*", builder.tool(["unsquashfs", "-version"], binds={}).out)
    lacks = next((line for line in lines if _NO_ZSTD in line), None)
    if not lacks and not (shown and (int(shown[1]), int(shown[2])) < _OLDEST):
        return None
    return UnfitError(
        "this machine's unsquashfs cannot read the image",
        where=process.which("unsquashfs"),
        wanted="squashfs-tools {}.{} or newer, with zstd".format(*_OLDEST),
        found=lacks or (shown and shown[0]),
        fix="install a newer one; or, with a Docker Engine, take it off PATH: dray then runs one in a container",
    )
