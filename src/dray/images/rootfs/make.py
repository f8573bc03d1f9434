"""An image's root filesystem, made by Apptainer as an ordinary user."""

from __future__ import annotations

import shlex
from pathlib import Path

from dray import process
from dray.contract.findings import ConfigError, UnfitError
from dray.images.rootfs import ROOTFS


def build_argv(*, tool: str, definition: Path, binds: dict[Path, str], base: str, rootfs: Path) -> list[str]:
    """Apptainer's command; the definition takes its base from the build argument BASE."""
    for path in binds:
        if set(",:") & set(str(path)):
            raise ConfigError(
                "Apptainer cannot bind a path with , or : in it", found=path, fix="move the checkout to another folder"
            )
    return [
        *(tool, "build", "--sandbox", "--no-cleanup"),
        *(word for path, target in binds.items() for word in ("--bind", f"{path}:{target}")),
        *("--build-arg", f"BASE={base}"),
        *(str(rootfs), str(definition)),
    ]


def build(*, definition: Path, binds: dict[Path, str], base: Path, scratch: Path, epoch: int) -> Path:
    """Build scratch/rootfs. A failed build leaves its files in scratch."""
    tool = process.apptainer()
    if tool is None:
        raise UnfitError("Apptainer is not on this machine", wanted="apptainer or singularity on PATH")
    rootfs = scratch / ROOTFS
    name = start_from(base, scratch)
    argv = build_argv(tool=tool, definition=definition, binds=binds, base=name, rootfs=rootfs)
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
        return unpacked.name
    unpacked.mkdir()
    # An ordinary user can make no devices, and a container has the host's anyway. `docker export` writes no ./.
    devices = ["--anchored", "--exclude=./dev/*", "--exclude=dev/*"]
    done = process.run(["tar", "--extract", "--file", base, "--directory", unpacked, *devices], check=False)
    if done.code or not (unpacked / "usr" / "bin" / "env").exists():
        raise ConfigError(
            "the base is not a root filesystem",
            where=base,
            wanted="the tar of a root filesystem, or a SIF",
            found="\n".join(done.err.strip().splitlines()[-3:]) or "no /usr/bin/env in it",
            fix="containers/base/make-base.sh bookworm build/base/bookworm.tar makes one",
        )
    return unpacked.name
