"""An image's root filesystem, made by Apptainer as an ordinary user, and packed. The builder container runs it too."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
from pathlib import Path

from dray import process
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images import layer, siffile, squash

# What runs main() below.
PROGRAM = ("python3", "-m", "dray.images.rootfs")
ROOTFS = "rootfs"
SIF = "image.sif"
LAYER = "image.tar"
TOOLS = "tools.json"
# How the program tells its caller an error, whole.
ERROR = "dray-error: "
# As ELF files number them.
_MACHINES = {b"\x3e\x00": "amd64", b"\xb7\x00": "arm64"}


def apptainer() -> str | None:
    """The program's name on this machine; sites keep the old one for a long time."""
    return next((name for name in ("apptainer", "singularity") if process.which(name)), None)


def build_argv(*, tool: str, definition: Path, binds: dict[Path, str], base: str, rootfs: Path) -> list[str]:
    """Apptainer's command; the definition takes its base from the argument."""
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


def make(*, definition: Path, binds: dict[Path, str], base: Path, scratch: Path, epoch: int) -> Path:
    """Build scratch/rootfs. Where it fails, what there is of it stays in scratch."""
    tool = apptainer()
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
    """Apptainer's From for a base, by a name that no machine's path is in."""
    here = scratch / f"base{'.sif' if base.suffix == '.sif' else ''}"
    if base.suffix == ".sif":
        here.symlink_to(base)
        found = siffile.read(base).architecture
    else:
        here.mkdir()
        # An ordinary user can make no devices, and a container has the host's anyway.
        process.run(["tar", "--extract", "--file", base, "--directory", here, "--exclude=./dev/*"])
        found = _architecture(here)
    wanted = layer.MACHINES.get(platform.machine(), platform.machine())
    if found != wanted:
        raise ConfigError(
            "the base is of another architecture" if found else "the base is no root filesystem",
            where=base,
            wanted=f"one for {wanted}, which this machine runs",
            found=f"one for {found}" if found else "no /usr/bin/env in it",
            fix="containers/base/make-base.sh bookworm build/base/bookworm.tar makes one here",
        )
    return here.name


def _architecture(rootfs: Path) -> str:
    """Whose programs a root filesystem holds, by the head of one that each has."""
    try:
        with (rootfs / "usr" / "bin" / "env").open("rb") as program:
            head = program.read(20)
    except OSError:
        head = b""
    return _MACHINES.get(head[18:20], "") if head.startswith(b"\x7fELF") else ""


def labels(inputs: Path) -> dict[str, str]:
    """The labels of a build's inputs."""
    return dict(line.split(" ", 1) for line in (inputs / "labels").read_text().splitlines())


def _label(rootfs: Path, inputs: Path) -> None:
    """Apptainer adds to the labels when and by which Apptainer it was built, and from which path."""
    (rootfs / ".singularity.d" / "labels.json").write_text(json.dumps(labels(inputs), indent=1, sort_keys=True))


def _versions() -> dict[str, str]:
    """What makes the image: with others of these, the same inputs may give other bytes."""
    asked = {"apptainer": [apptainer() or "apptainer", "--version"], "mksquashfs": ["mksquashfs", "-version"]}
    said = {name: process.run(argv, check=False).out for name, argv in asked.items()}
    return {name: match[0] for name, out in said.items() if (match := re.search(r"\d+\.\d+\S*", out))}


def main() -> None:
    """Make a root filesystem in SCRATCH, and pack it in the formats that are asked for."""
    words = argparse.ArgumentParser(prog="dray.images.rootfs", description=main.__doc__)
    words.add_argument("definition", type=Path)
    words.add_argument("base", type=Path)
    words.add_argument("scratch", type=Path)
    words.add_argument("--bind", action="append", default=[], nargs=2, metavar=("PATH", "TARGET"))
    words.add_argument("--epoch", type=int, default=0)
    words.add_argument("--sif", action="store_true")
    words.add_argument("--docker", metavar="TAG")
    words.add_argument("--label", action="append", default=[], nargs=2, metavar=("KEY", "VALUE"), help="for Docker")
    said = words.parse_args()
    binds = {Path(path): target for path, target in said.bind}
    os.umask(0o022)
    if said.sif:
        squash.require()
        (said.scratch / TOOLS).write_text(json.dumps(_versions()))
    rootfs = make(definition=said.definition, binds=binds, base=said.base, scratch=said.scratch, epoch=said.epoch)
    if said.sif or said.docker:
        _label(rootfs, said.definition.parent)
    if said.sif:
        squash.pack(rootfs, said.scratch / SIF, epoch=said.epoch, definition=said.definition)
    if said.docker:
        inputs = said.definition.parent
        more = labels(inputs) | dict(said.label)
        layer.pack(rootfs, said.scratch / LAYER, epoch=said.epoch, inputs=inputs, tag=said.docker, labels=more)


if __name__ == "__main__":
    try:
        main()
    except DrayError as error:
        print(ERROR + json.dumps({"problem": error.problem, "details": error.details}))
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
        raise SystemExit(exit_codes.FAILED) from None
