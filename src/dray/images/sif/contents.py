"""A file of a SIF, read from its squashfs without root and without starting it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.clients import builder
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images.sif.format import Sif

# The version of squashfs-tools that brought zstd and all options for listing and unpacking.
_OLDEST = (4, 4)
_NO_ZSTD = "unsupported by this version"


def file(sif: Sif, path: str) -> bytes | None:
    """The content of one file; None if it is missing, or a link."""
    with TemporaryDirectory(prefix="dray-") as scratch:
        # Only newer versions write a file to standard output; login nodes keep old ones for long.
        unpacked = Path(scratch) / "out"
        argv = ["unsquashfs", "-no-progress", "-offset", str(sif.system.offset), "-no-xattrs", "-dest", str(unpacked)]
        done = builder.tool([*argv, str(sif.path), path], binds={sif.path: False, Path(scratch): True})
        if done.code:
            raise _refused(sif, (done.err or done.out).strip().splitlines())
        # A link would be read on this machine.
        named = unpacked / path
        return named.read_bytes() if named.is_file() and not named.is_symlink() else None


def _refused(sif: Sif, lines: Sequence[str]) -> DrayError:
    """The error of an unsquashfs that is too old, and prints only its options, or of a damaged image."""
    shown = re.search(r"version (\d+)\.(\d+)\S*", builder.tool(["unsquashfs", "-version"], binds={}).out)
    lacks = next((line for line in lines if _NO_ZSTD in line), None)
    if lacks or (shown and (int(shown[1]), int(shown[2])) < _OLDEST):
        return UnfitError(
            "this machine's unsquashfs cannot read the image",
            where=process.which("unsquashfs"),
            wanted="squashfs-tools {}.{} or newer, with zstd".format(*_OLDEST),
            found=lacks or (shown and shown[0]),
            fix="install a newer one; or, with a Docker Engine, take it off PATH: dray then runs one in a container",
        )
    return ConfigError(
        "the image's files cannot be read",
        where=sif.path,
        found="\n".join(lines[-5:]),
        fix="build or copy the image again",
    )
