"""Make a layer: lock, fetch, install into a folder, and pack that."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import __version__, process
from dray.clients import builder
from dray.config.image import Image
from dray.contract.findings import ConfigError
from dray.images import store
from dray.images.layers import PROGRAM, SIF, TREE
from dray.images.layers import lock as layer_lock
from dray.images.log import build_log
from dray.images.sif import record
from dray.images.sources import inputs, lock, pip, wheels

Say = Callable[[str], None]
_INSTALLED = "installed"
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
            _install(checkout, image, path, scratch, own_wheels=own_wheels, say=say)
            recorded = _packed(checkout, image, path, scratch, say=say)
            record.deliver(scratch / "out" / SIF, out, recorded)
    return out, recorded


def _install(checkout: Path, image: Image, path: Path, scratch: Path, *, own_wheels: Path | None, say: Say) -> None:
    """Install the wheels into a folder, as an installation into the image would."""
    tree = scratch / _INSTALLED
    files, modules = scratch / "wheels", tree / "lib"
    for folder in (files, modules):
        folder.mkdir(parents=True)
    with inputs.alone(checkout / "build"):
        say("dray: wheels")
        fetched = wheels.fetch(
            locks=[path], image=image.model_copy(update={"vendor": []}), folder=checkout / "build" / "wheels",
            wheels=own_wheels, say=say,
        )  # fmt: skip
        for wheel in fetched:
            inputs.link(wheel, files / wheel.name)
    process.run(pip.install_argv(requirements=path, python=image.python, wheels=files, folder=modules))
    if (modules / "bin").is_dir():
        _start_with_the_images_python(modules)
        (modules / "bin").rename(tree / "bin")


def _start_with_the_images_python(modules: Path) -> None:
    """Give console scripts, and their lines in the packages' records, the image's Python; pip wrote this machine's."""
    for script in (modules / "bin").iterdir():
        script.write_bytes(_SHEBANG.sub(_PYTHON, script.read_bytes(), count=1))
    for listed in modules.glob("*.dist-info/RECORD"):
        lines = listed.read_text(encoding="utf-8").splitlines()
        kept = (re.sub(r"^(?:\.\./)*bin/([^,]+),.*", r"../bin/\1,,", line) for line in lines)
        listed.write_text("".join(f"{line}\n" for line in sorted(kept)), encoding="utf-8")


def _packed(checkout: Path, image: Image, path: Path, scratch: Path, *, say: Say) -> record.Record:
    base, tree = store.sif(checkout, image.variant), scratch / _INSTALLED
    epoch = lock.epoch(checkout / "containers" / image.variant / "requirements.lock")
    out = scratch / "out"
    out.mkdir()
    builder.run(
        checkout,
        [*PROGRAM, base, tree, path, out, "--epoch", str(epoch), "--python", image.python],
        binds={base: False, tree: False, path: False, out: True},
        on_line=say,
    )
    shutil.rmtree(out / TREE, ignore_errors=True)
    return record.Record(
        variant=image.variant,
        dray=__version__,
        base=base.name,
        inputs=record.File.of(path).sha256,
        epoch=epoch,
        tools={},
        sif=record.File.of(out / SIF),
        python=image.python,
        needs=layer_lock.needs(path),
        packages={pin.name: pin.version for pin in lock.read(path)},
    )
