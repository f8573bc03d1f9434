"""Pack a root filesystem as a SIF: squashfs with the same bytes every time, in a file that dray writes itself."""

from __future__ import annotations

import re
from pathlib import Path

from dray import process
from dray.contract.findings import UnfitError
from dray.images.sif import format as sif_format

# Measured: benchmarks/results.
_NEWER = {"-all-time", "-mkfs-time", "-root-mode", "-no-xattrs", "zstd"}
COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "9", "-b", "256K")


def argv(rootfs: Path, out: Path, *, epoch: int) -> list[str]:
    """mksquashfs's command: files belong to root, have one time, and no extended attributes of this machine."""
    return [
        *("mksquashfs", str(rootfs), str(out), "-noappend", "-no-progress", "-quiet", "-no-xattrs", "-no-exports"),
        *("-all-root", "-root-mode", "0755", "-all-time", str(epoch), "-mkfs-time", str(epoch), *COMPRESSION),
    ]


def require() -> None:
    """Refuse a mksquashfs that lacks these options, before a build spends minutes."""
    done = process.run(["mksquashfs", "-help"], check=False)
    options = set(re.findall(r"(?<!\S)(-[a-z-]+|zstd)(?!\S)", done.out + done.err))
    missing = [word for word in argv(Path(), Path(), epoch=0) if word in _NEWER and word not in options]
    if missing:
        raise UnfitError(
            "this mksquashfs cannot write the same bytes every time",
            wanted="squashfs-tools 4.4 or newer, with zstd",
            found=f"a version without {' '.join(missing)}",
            fix="load or install a newer one (module load squashfs-tools; conda install squashfs-tools)\n"
            "or build with a Docker Engine",
        )


def pack(rootfs: Path, out: Path, *, epoch: int, definition: Path) -> None:
    """Write the SIF `out`."""
    print("dray: pack the SIF", flush=True)
    squashfs = out.with_suffix(".squashfs")
    process.run(argv(rootfs, squashfs, epoch=epoch))
    text = definition.read_bytes()
    sif_format.write(squashfs, out, epoch=epoch, definition=text, metadata=sif_format.metadata(rootfs, text))
    squashfs.unlink()
