"""An image's root filesystem, made by Apptainer as an ordinary user."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

from dray import process
from dray.contract.findings import ConfigError
from dray.images.rootfs import ROOTFS
from dray.images.sif import format as sif_format

_FIX = "containers/base/make-base.sh bookworm build/base/bookworm.tar makes one"


def build(*, definition: Path, out: Path, base: Path, scratch: Path, epoch: int) -> Path:
    """Build scratch/rootfs. The steps read the definition's folder in /mnt, and may write `out`, which is /srv.

    A failed build leaves its files in scratch.
    """
    rootfs = scratch / ROOTFS
    argv = [
        *(process.apptainer() or "apptainer", "build", "--sandbox", "--no-cleanup"),
        *("--bind", f"{definition.parent}:/mnt", "--bind", f"{out}:/srv"),
        # The definition takes its base from the build argument BASE.
        *("--build-arg", f"BASE={start_from(base, scratch)}"),
        *(str(rootfs), str(definition)),
    ]
    print(shlex.join(argv), flush=True)
    environment = {
        "SOURCE_DATE_EPOCH": str(epoch),
        "APPTAINER_TMPDIR": str(scratch),
        "SINGULARITY_TMPDIR": str(scratch),
    }
    process.run(argv, cwd=scratch, env=environment, show=True)
    return rootfs


def start_from(base: Path, scratch: Path) -> str:
    """The base's name for Apptainer's From, without a path of this machine."""
    unpacked = scratch / f"base{'.sif' if base.suffix == '.sif' else ''}"
    if base.suffix == ".sif":
        unpacked.symlink_to(base)
        sif_format.require_machine(base, what="base", where=base, fix=_FIX)
        return unpacked.name
    unpacked.mkdir()
    # An ordinary user can make no devices, and a container has the host's anyway. `docker export` writes no ./.
    devices = ["--anchored", "--exclude=./dev/*", "--exclude=dev/*"]
    done = process.run(["tar", "--extract", "--file", base, "--directory", unpacked, *devices], check=False)
    program = unpacked / "usr" / "bin" / "env"
    if done.code or not program.exists():
        raise ConfigError(
            "the base is not a root filesystem",
            where=base,
            wanted="the tar of a root filesystem, or a SIF",
            found="\n".join(done.err.strip().splitlines()[-3:]) or "no /usr/bin/env in it",
            fix=_FIX,
        )
    processor = _processor(program)
    if processor and processor != _processor(Path(sys.executable)):
        wanted = f"a base for {platform.machine()}"
        raise ConfigError("the base is for another architecture", where=base, wanted=wanted, fix=_FIX)
    return unpacked.name


def _processor(program: Path) -> bytes:
    """The number that a program's ELF header has for its processor; empty for a script."""
    with program.open("rb") as file:
        head = file.read(20)
    return head[18:] if head.startswith(b"\x7fELF") else b""
