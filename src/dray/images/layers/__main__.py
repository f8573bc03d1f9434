"""Compile a layer's modules with the image's own Python, and pack the layer as a SIF."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from dray import process
from dray.contract import exit_codes, findings
from dray.contract.findings import DrayError, UnfitError
from dray.engines.base import LAYER
from dray.images.layers import SIF, TREE
from dray.images.rootfs import squash
from dray.images.sif import format as sif_format

# What Debian's Python needs to start; the image's own packages and compilers are not unpacked.
_SYSTEM = (
    "bin",
    "lib",
    "lib64",
    "usr/bin/*sh",
    "usr/bin/*python3*",
    "usr/lib/python3*",
    "usr/lib/*-linux-gnu",
    "usr/lib64",
)
_MADE = ("dev", "proc", "sys", "tmp", "var/tmp", "etc", LAYER.lstrip("/"))
# A hash in place of a time: the same bytes each time, and no look at the source when it is imported.
_COMPILE = (
    "import compileall, py_compile, sys; "
    "compileall.compile_dir(sys.argv[1], quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
)


def main() -> None:
    """Read the command line, compile, pack."""
    asked = _parser().parse_args()
    os.umask(0o022)
    squash.require()
    tree = asked.scratch / TREE
    shutil.copytree(asked.tree, tree, symlinks=True)
    for path in tree.rglob("*"):  # others than the owner start it, whatever the umask was
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    print("dray: compile the modules with the image's Python", flush=True)
    _compile(asked.image, tree, asked.scratch / "system", python=asked.python)
    print("dray: pack the layer", flush=True)
    squashfs = asked.scratch / "layer.squashfs"
    process.run(squash.argv(tree, squashfs, epoch=asked.epoch))
    definition = asked.lock.read_bytes()
    sif_format.write(squashfs, asked.scratch / SIF, epoch=asked.epoch, definition=definition, role=sif_format.DATA)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dray.images.layers", description=__doc__)
    for name in ("image", "tree", "lock", "scratch"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--python", required=True)
    return parser


def _compile(image: Path, tree: Path, system: Path, *, python: str) -> None:
    tool = process.apptainer()
    if tool is None:
        raise UnfitError("Apptainer is not on this machine", wanted="apptainer or singularity on PATH")
    offset = str(sif_format.read(image).system.offset)
    unpack = ["unsquashfs", "-no-progress", "-quiet", "-no-xattrs", "-offset", offset, "-dest", str(system)]
    process.run([*unpack, str(image), *_SYSTEM])
    for name in _MADE:
        (system / name).mkdir(parents=True, exist_ok=True)
    process.run(
        [
            *(tool, "--quiet", "exec", "--cleanenv", "--no-mount=home,cwd,hostfs", "--pwd=/"),
            f'--mount=type=bind,"src={tree}","dst={LAYER}"',
            *(str(system), f"/usr/bin/python{python}", "-c", _COMPILE, f"{LAYER}/lib"),
        ],
        show=True,
    )


if __name__ == "__main__":
    try:
        main()
    except DrayError as error:
        print(findings.encode(error.finding))
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
        raise SystemExit(exit_codes.FAILED) from None
