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
from dray.errors import EXIT_FAILED, ConfigError, DrayError, UnfitError
from dray.images import layer, siffile, squash

ROOTFS = "rootfs"
SIF = "image.sif"
LAYER = "image.tar"
TOOLS = "tools.json"
# As ELF files number them.
_MACHINES = {b"\x3e\x00": "amd64", b"\xb7\x00": "arm64"}


def apptainer() -> str | None:
    """The program's name on this machine; sites keep the old one for a long time."""
    return next((name for name in ("apptainer", "singularity") if process.which(name)), None)


def build_argv(
    *, tool: str, definition: Path, binds: dict[Path, str], bootstrap: str, source: str, rootfs: Path
) -> list[str]:
    """Apptainer's command; the definition takes its base from the two arguments."""
    for path in binds:
        if set(",:") & set(str(path)):
            raise ConfigError(
                "Apptainer cannot bind a path with , or : in it", found=path, fix="move the checkout to another folder"
            )
    return [
        *(tool, "build", "--sandbox", "--no-cleanup"),
        *(word for path, target in binds.items() for word in ("--bind", f"{path}:{target}")),
        *("--build-arg", f"BOOTSTRAP={bootstrap}", "--build-arg", f"BASE={source}"),
        *(str(rootfs), str(definition)),
    ]


def make(*, definition: Path, binds: dict[Path, str], base: str, scratch: Path, epoch: int) -> Path:
    """Build scratch/rootfs. Where it fails, what there is of it stays in scratch."""
    tool = apptainer()
    if tool is None:
        raise UnfitError("Apptainer is not on this machine", wanted="apptainer or singularity on PATH")
    bootstrap, source = start_from(base, scratch)
    rootfs = scratch / ROOTFS
    # The definition is kept in the image: a base that is named from here shows no path of this machine.
    argv = build_argv(tool=tool, definition=definition, binds=binds, bootstrap=bootstrap, source=source, rootfs=rootfs)
    print(shlex.join(argv), flush=True)
    environment = {
        "SOURCE_DATE_EPOCH": str(epoch),
        "APPTAINER_TMPDIR": str(scratch),
        "SINGULARITY_TMPDIR": str(scratch),
    }
    process.run(argv, cwd=scratch, env=environment, show=True)
    return rootfs


def local_base(base: str) -> Path | None:
    """The file or folder that a base is, or None where it is the reference of an image."""
    path = Path(base).expanduser().resolve()
    if path.exists():
        return path
    if base.startswith(("/", ".", "~")) or path.suffix in (".tar", ".sif"):
        raise ConfigError(
            "the base is not there",
            wanted="an image reference, a SIF, a folder, or the tar of a root filesystem",
            found=base,
            fix=f"make one: containers/base/make-base.sh bookworm {base}" if path.suffix == ".tar" else None,
        )
    return None


def start_from(base: str, scratch: Path) -> tuple[str, str]:
    """Apptainer's Bootstrap and From for a base."""
    path = local_base(base)
    if path is not None and path.suffix == ".sif":
        _need_architecture(path, siffile.read(path).architecture)
        return "localimage", str(path)
    if path is None:
        scheme, _, reference = base.rpartition("://")
        # Apptainer refuses a tag beside a digest, which alone says which image is meant.
        return scheme or "docker", re.sub(r":[^:/@]+(?=@)", "", reference)
    if path.is_dir():
        _need_architecture(path, _architecture(path))
        return "localimage", str(path)
    unpacked = scratch / "base"
    unpacked.mkdir()
    # An ordinary user can make no devices, and a container has the host's anyway.
    process.run(["tar", "--extract", "--file", path, "--directory", unpacked, "--exclude=./dev/*"])
    _need_architecture(path, _architecture(unpacked))
    return "localimage", unpacked.name


def _architecture(rootfs: Path) -> str:
    """Whose programs a root filesystem holds, by the head of one that each has."""
    try:
        with (rootfs / "usr" / "bin" / "env").open("rb") as program:
            head = program.read(20)
    except OSError:
        head = b""
    return _MACHINES.get(head[18:20], "none") if head.startswith(b"\x7fELF") else "none"


def _need_architecture(base: Path, found: str) -> None:
    wanted = layer.MACHINES.get(platform.machine(), platform.machine())
    if found != wanted:
        raise ConfigError(
            "the base is of another architecture" if found != "none" else "the base is no root filesystem",
            where=base,
            wanted=f"one for {wanted}, which this machine runs",
            found=f"one for {found}" if found != "none" else "no /usr/bin/env in it",
            fix="containers/base/make-base.sh bookworm build/base/bookworm.tar makes one here",
        )


def labels(inputs: Path) -> dict[str, str]:
    """The labels of a build's inputs."""
    return dict(line.split(" ", 1) for line in (inputs / "labels").read_text().splitlines())


def _label(rootfs: Path, inputs: Path) -> None:
    """Apptainer adds to the labels when and by which Apptainer it was built, and from which path."""
    (rootfs / ".singularity.d" / "labels.json").write_text(json.dumps(labels(inputs), indent=1, sort_keys=True))


def _versions() -> dict[str, str]:
    """What makes the image: with others of these, the same inputs may give other bytes."""
    asked = {"apptainer": [apptainer() or "apptainer", "--version"], "mksquashfs": ["mksquashfs", "-version"]}
    said = {name: process.run(argv, check=False) for name, argv in asked.items()}
    return {name: re.findall(r"\d+\.\d+\S*", done.out)[0] for name, done in said.items()}


def main() -> None:
    """Make a root filesystem in SCRATCH, and pack it in the formats that are asked for."""
    words = argparse.ArgumentParser(prog="dray.images.rootfs", description=main.__doc__)
    words.add_argument("definition", type=Path)
    words.add_argument("base")
    words.add_argument("scratch", type=Path)
    words.add_argument("--bind", action="append", default=[], help="PATH:TARGET, while it is built")
    words.add_argument("--epoch", type=int, default=0)
    words.add_argument("--sif", action="store_true")
    words.add_argument("--docker", metavar="TAG")
    words.add_argument("--label", action="append", default=[], help="KEY=VALUE, for Docker")
    said = words.parse_args()
    binds = {Path(path): target for path, _, target in (bind.rpartition(":") for bind in said.bind)}
    os.umask(0o022)
    (said.scratch / TOOLS).write_text(json.dumps(_versions()))
    rootfs = make(definition=said.definition, binds=binds, base=said.base, scratch=said.scratch, epoch=said.epoch)
    if said.sif or said.docker:
        _label(rootfs, said.definition.parent)
    if said.sif:
        squash.pack(rootfs, said.scratch / SIF, epoch=said.epoch, definition=said.definition)
    if said.docker:
        inputs = said.definition.parent
        more = dict(label.split("=", 1) for label in said.label)
        layer.pack(
            rootfs, said.scratch / LAYER, epoch=said.epoch, inputs=inputs, tag=said.docker, labels=labels(inputs) | more
        )


if __name__ == "__main__":
    try:
        main()
    except DrayError as error:
        print(error)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
        raise SystemExit(EXIT_FAILED) from None
