"""A file of a SIF, read from its squashfs without root and without starting it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from dray.clients import builder
from dray.contract.findings import ConfigError, UnfitError
from dray.images.sif.format import Sif


def file(sif: Sif, path: str) -> bytes | None:
    """The content of one file; None if it is missing, or a link."""
    with TemporaryDirectory(prefix="dray-") as scratch:
        # Only newer versions write a file to standard output; login nodes keep old ones for long.
        unpacked = Path(scratch) / "out"
        argv = ["unsquashfs", "-no-progress", "-offset", str(sif.system.offset), "-no-xattrs", "-dest", str(unpacked)]
        done = builder.tool([*argv, str(sif.path), path], binds={sif.path: False, Path(scratch): True})
        if done.code:
            old = "unsupported by this version" in done.err or "SYNTAX" in done.err
            raise (UnfitError if old else ConfigError)(
                "the image's files cannot be read",
                where=sif.path,
                wanted="squashfs-tools 4.4 or newer, with zstd, and a whole image",
                found="\n".join((done.err or done.out).strip().splitlines()[-5:]),
                fix="unsquashfs -version: install a newer one, or, with a Docker Engine, take it off PATH\n"
                "or build or copy the image again",
            )
        # A link would be read on this machine.
        named = unpacked / path
        return named.read_bytes() if named.is_file() and not named.is_symlink() else None
