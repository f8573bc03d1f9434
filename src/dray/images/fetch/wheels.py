"""All files that the locks name, and dray's own wheel: gathered on the host, so that a build needs no index."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dray import process
from dray.clients import progress
from dray.clients.progress import Say
from dray.config.image_definition import Image
from dray.contract.findings import ConfigError
from dray.images.fetch import pip, sha256
from dray.images.fetch.platforms import command, fits, present
from dray.images.locks import lock
from dray.images.locks.lock import Pin

# The first moment that a wheel, being a zip file, can hold. Not a lock's date: all variants share dray's wheel.
_EPOCH = "315532800"


def fetch(
    *,
    locks: Sequence[Path],
    image: Image,
    folder: Path,
    wheels: Path | None = None,
    say: Say,
) -> list[Path]:
    """Exactly the locked files: from the user's own `wheels`, from `folder`, or else from where pip looks."""
    if wheels and not wheels.is_dir():
        raise ConfigError("the folder of wheels does not exist", where=wheels)
    folder.mkdir(parents=True, exist_ok=True)
    versions = {vendor.name: vendor.version for vendor in image.vendor}
    locked = (pin for path in locks for pin in lock.read(path))
    pins = {pin.name: replace(pin, version=versions.get(pin.name, pin.version)) for pin in locked}
    files, missing = present(pins.values(), [wheels, folder] if wheels else [folder], image.python)
    if wheels:
        _refuse_others(missing, wheels, image.python)
    if missing:
        say(f"dray: fetch {len(missing)} of {len(pins)} packages")
    total = image.size.wheels_mb * 1_000_000 if image.size else 0
    size = sum(path.stat().st_size for path in files)
    indexes = {vendor.name: vendor.index for vendor in image.vendor}
    with progress.watch(folder, "wheels", total=max(0, total - size), say=say):
        # Vendors' wheels first: if one is missing, the minutes for the rest are wasted.
        for index in (*dict.fromkeys(indexes.values()), ""):
            group = [pin for pin in missing if indexes.get(pin.name, "") == index]
            if group:
                files += pip.download(group, image=image, folder=folder, index=index, say=say)
    return sorted(files, key=lambda path: path.name)


def own(*, checkout: Path, folder: Path) -> Path:
    """dray's own wheel, made again when its sources have changed."""
    read = ("pyproject.toml", "hatch_build.py", "README.md", ".gitignore", "src/**/*")
    paths = sorted(path for pattern in read for path in checkout.glob(pattern))
    sources = (path for path in paths if path.is_file() and path.suffix != ".pyc")
    lines = "".join(f"{sha256(path)} {path.relative_to(checkout)}\n" for path in sources)
    made = folder / lock.digest(lines)
    if not any(made.glob("*.whl")):
        shutil.rmtree(folder, ignore_errors=True)
        argv = [*command("wheel"), "--quiet", "--wheel-dir", str(made), str(checkout)]
        argv += ["--build-constraint", str(lock.venv(checkout))]  # with hashes, as pip 26.1 and newer can
        process.run(argv, env={"SOURCE_DATE_EPOCH": _EPOCH, "DRAY_WHEEL": "image"})
    return next(made.glob("*.whl"))


def _refuse_others(missing: Sequence[Pin], wheels: Path, python: str) -> None:
    """Refuse a wheel in the user's folder with the right name and another hash: he expects it in the image."""
    for pin in missing:
        for path in wheels.glob(f"{pin.name.replace('-', '_')}-{pin.version}-*.whl"):
            if fits(path, python):
                raise ConfigError(
                    "a wheel does not match its locked hash",
                    where=path,
                    wanted="\n".join(f"sha256 {digest}" for digest in pin.hashes),
                    found=f"sha256 {sha256(path)}",
                    fix="fetch the file again from its publisher, or remove it from the folder",
                )
