"""A root filesystem as a SIF: squashfs with the same bytes every time, in a container file of our own writing."""

from __future__ import annotations

import re
from pathlib import Path

from dray import process
from dray.contract.findings import UnfitError
from dray.images.sif import format as sif_format

# benchmarks/results has what each of these brought.
_NEWER = {"-all-time", "-mkfs-time", "-root-mode", "-no-xattrs", "zstd"}
COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "9", "-b", "256K")


def argv(rootfs: Path, out: Path, *, epoch: int) -> list[str]:
    """Every file root's and of one time; no attributes of the building machine's filesystem."""
    return [
        *("mksquashfs", str(rootfs), str(out), "-noappend", "-no-progress", "-quiet", "-no-xattrs", "-no-exports"),
        *("-all-root", "-root-mode", "0755", "-all-time", str(epoch), "-mkfs-time", str(epoch), *COMPRESSION),
    ]


def require() -> None:
    """Refuse a mksquashfs that cannot do this, before minutes are spent on what it is to pack."""
    done = process.run(["mksquashfs", "-help"], check=False)
    options = set(re.findall(r"(?<!\S)(-[a-z-]+|zstd)(?!\S)", done.out + done.err))
    missing = [word for word in argv(Path(), Path(), epoch=0) if word in _NEWER and word not in options]
    if missing:
        raise UnfitError(
            "mksquashfs cannot make the same bytes every time",
            wanted="squashfs-tools 4.4 or newer, with zstd",
            found=f"one without {' '.join(missing)}",
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
