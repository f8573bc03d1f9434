"""Make a layer: lock, fetch, install into a folder, and pack that."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import __version__, process
from dray.clients import apptainer, builder
from dray.clients.progress import Say
from dray.config.image_definition import Image
from dray.contract.findings import ConfigError, DrayError
from dray.engines.base import LAYER
from dray.images import bundle, inputs, store
from dray.images.build_output import build_log
from dray.images.fetch import pip, sha256, wheels
from dray.images.layers import layer_lock
from dray.images.locks import lock
from dray.images.rootfs import squashfs
from dray.images.sif import format as sif_format
from dray.images.sif import record

# A hash in place of a time: the same bytes each time, and no look at the source when it is imported.
_COMPILE = (
    "import compileall, py_compile, sys; "
    "compileall.compile_dir(sys.argv[1], quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
)
_COMPILE_S = 1800.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}")
# The first line of a console script of pip's: this machine's Python, started by sh if its path has a space.
_SHEBANG = re.compile(rb"\A(#!/bin/sh\n'''exec' .*\n' '''\n|#!.*python.*\n)")
_PYTHON = b"#!/opt/dray/bin/python3\n"


def make(
    checkout: Path,
    variant: str,
    requirements: Sequence[str],
    *,
    name: str = "",
    locked: Path | None = None,
    own_wheels: Path | None = None,
    upgrade: bool = False,
) -> tuple[Path, record.Record]:
    """Make build/dray-VARIANT-NAME.sif, its record and its lock. A failure keeps the previous ones."""
    image = inputs.image(checkout, variant)
    base = store.sif(checkout, variant)
    if not base.is_file():
        raise ConfigError("the image for this layer does not exist", wanted=base, fix=f"make image-{variant}")
    name = name or (locked.stem.removeprefix(f"dray-{variant}-") if locked else layer_lock.name_of(requirements))
    if not _NAME.fullmatch(name):
        wanted = "at most 41 lower-case letters, digits, -, _ and ."
        raise ConfigError("a layer cannot have this name", wanted=wanted, found=name, fix="--name mine")
    out = store.layer(checkout, variant, name)
    path = out.with_suffix(".lock")
    with build_log(checkout / "build" / "logs" / f"{variant}-{name}.log", out=out.parent) as say, builder.engine():
        packages = lock.read(checkout / "containers" / variant / "requirements.lock")
        if locked is None:
            say("dray: lock")
            layer_lock.update(path, requirements, image, packages, wheels=own_wheels, upgrade=upgrade)
        elif locked.resolve() != path.resolve():
            lock.require_made_from(locked, lock.about(locked)[1])
            shutil.copyfile(locked, path)
        if not lock.read(path):
            raise ConfigError(
                "the image has all of these packages already",
                found="\n".join(f"{name} {version}" for name, version in layer_lock.needs(path).items()),
                fix="use the image without a layer",
            )
        with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent, ignore_cleanup_errors=True) as made:
            scratch = Path(made)
            tree = _installed(checkout, image, path, scratch, own_wheels=own_wheels, say=say)
            (scratch / "out").mkdir()
            sif = scratch / "out" / "layer.sif"
            epoch = lock.epoch(checkout / "containers" / variant / "requirements.lock")
            _pack(base, tree, sif, definition=path.read_bytes(), epoch=epoch, say=say)
            recorded = record.Record(
                variant=variant,
                dray=__version__,
                base=base.name,
                inputs=sha256(path),
                epoch=epoch,
                tools={},
                sif=record.File.of(sif),
                python=image.python,
                needs=layer_lock.needs(path),
                packages={pin.name: pin.version for pin in lock.read(path)},
            )
            record.deliver(sif, out, recorded)
    return out, recorded


def _installed(checkout: Path, image: Image, path: Path, scratch: Path, *, own_wheels: Path | None, say: Say) -> Path:
    """A folder with the installed wheels, as an installation into the image would leave them."""
    tree = scratch / "installed"
    files, modules = scratch / "wheels", tree / "lib"
    with inputs.alone(checkout / "build"):
        say("dray: wheels")
        fetched = wheels.fetch(
            locks=[path], image=image.model_copy(update={"vendor": [], "size": None}),
            folder=checkout / "build" / "wheels", wheels=own_wheels, say=say,
        )  # fmt: skip
    os.umask(0o022)  # others than the owner start the layer
    for folder in (files, modules):
        folder.mkdir(parents=True)
    for wheel in fetched:
        bundle.link(wheel, files / wheel.name)
    process.run(pip.install_argv(requirements=path, python=image.python, wheels=files, folder=modules))
    if (modules / "bin").is_dir():
        _start_with_the_images_python(modules)
        (modules / "bin").rename(tree / "bin")
    return tree


def _start_with_the_images_python(modules: Path) -> None:
    """Give console scripts, and their lines in the packages' records, the image's Python; pip wrote this machine's."""
    for script in (modules / "bin").iterdir():
        script.write_bytes(_SHEBANG.sub(_PYTHON, script.read_bytes(), count=1))
    for listed in modules.glob("*.dist-info/RECORD"):
        lines = listed.read_text(encoding="utf-8").splitlines()
        kept = (re.sub(r"^(?:\.\./)*bin/([^,]+),.*", r"../bin/\1,,", line) for line in lines)
        listed.write_text("".join(f"{line}\n" for line in sorted(kept)), encoding="utf-8")


def _pack(base: Path, tree: Path, out: Path, *, definition: bytes, epoch: int, say: Say) -> None:
    """Compile the modules with the image's own Python, and write the SIF."""
    say("dray: compile the modules with the image's Python")
    quoted = str(tree).replace('"', '""')
    mount = f'--mount=type=bind,"src={quoted}","dst={LAYER}"'
    argv = ["python3", "-c", _COMPILE, f"{LAYER}/lib"]
    _require(apptainer.execute(base.resolve(), argv, options=[mount], binds={tree: True}, seconds=_COMPILE_S))
    say("dray: pack the layer")
    if process.which("mksquashfs"):
        squashfs.require()
    packed = out.with_suffix(".squashfs")
    _require(builder.tool(squashfs.argv(tree, packed, epoch=epoch), binds={tree: False, out.parent: True}))
    sif_format.write(packed, out, epoch=epoch, definition=definition, role=sif_format.DATA)


def _require(done: process.Done) -> None:
    if done.code:
        raise DrayError(f"{done.argv[0]} failed with exit code {done.code}", found=done.err.strip())
