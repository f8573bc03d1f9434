"""A root filesystem as a SIF: squashfs with the same bytes every time, in a container file of our own writing."""

from __future__ import annotations

from pathlib import Path

from dray import process
from dray.images import siffile

# docs/measurements has what each of these brought.
COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "15", "-b", "256K")


def argv(rootfs: Path, out: Path, *, epoch: int) -> list[str]:
    """Every file root's and of one time; no attributes of the building machine's filesystem."""
    return [
        *("mksquashfs", str(rootfs), str(out), "-noappend", "-no-progress", "-quiet", "-no-xattrs", "-no-exports"),
        *("-all-root", "-root-mode", "0755", "-all-time", str(epoch), "-mkfs-time", str(epoch), *COMPRESSION),
    ]


def pack(rootfs: Path, out: Path, *, epoch: int, definition: Path) -> None:
    """Write the SIF `out`."""
    print("dray: pack the SIF", flush=True)
    squashfs = out.with_suffix(".squashfs")
    process.run(argv(rootfs, squashfs, epoch=epoch))
    said = definition.read_bytes()
    siffile.write(squashfs, out, epoch=epoch, definition=said, metadata=siffile.metadata(rootfs, said))
    squashfs.unlink()
