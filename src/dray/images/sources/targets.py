"""Check that one lock has a wheel of every package for each machine and Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.config.image import Image
from dray.contract.findings import ConfigError, DrayError
from dray.images.sources import lock, venv

_MACHINES, _PLATFORM = ("x86_64", "aarch64"), "manylinux_2_28"
# dray builds images with the first of their Pythons; sites move on to newer ones.
_IMAGES, _HOSTS = ("3.11", "3.12"), ("3.11", "3.12", "3.13", "3.14")


def of_image(checkout: Path, image: Image) -> list[str]:
    """Check an image's locks, without vendors' wheels, which another index has. Returns a line per target.

    If the image has no vendors' wheels, dray also checks that the lock names every package.
    """
    folder = checkout / "containers" / image.variant
    locks = [path for path in (folder / "requirements.lock", folder / "build.lock") if path.exists()]
    pins = [pin for path in locks for pin in lock.read(path)]
    others = {lock.SOURCE_ONLY, *(vendor.name for vendor in image.vendor)}
    asked = {pin.name: pin for pin in pins if pin.name not in others}
    text = "".join(f"{pin}\n" for pin in asked.values())
    return _served(text, locks[0], image.variant, _IMAGES, alone=bool(image.vendor))


def of_hosts(checkout: Path) -> list[str]:
    """Check the lock of the machines that submit, build and test. Returns a line per target."""
    path = venv.path(checkout)
    return _served(path.read_text(encoding="utf-8"), path, venv.NAME, _HOSTS, alone=True)


def _served(text: str, where: Path, name: str, pythons: Sequence[str], *, alone: bool) -> list[str]:
    """Ask the index, without fetching, whether each package has a locked wheel for each target."""
    found = []
    with TemporaryDirectory(prefix="dray-") as scratch:
        file = Path(scratch) / "requirements.lock"
        file.write_text(text)
        for machine, python in product(_MACHINES, pythons):
            argv = _argv(file, machine, python, alone=alone)
            done = process.run(argv, env=lock.UV_ENVIRONMENT, check=False)
            if done.code != 0:
                raise _missing(where, name, machine, python, done.err)
            found.append(f"every wheel for {machine}, Python {python}")
    return found


def _argv(file: Path, machine: str, python: str, *, alone: bool) -> list[str]:
    return [
        *(lock.uv(), "pip", "install", "--quiet", "--dry-run", "--require-hashes", "--only-binary", ":all:"),
        *("--python-version", python, "--python-platform", f"{machine}-{_PLATFORM}"),
        *("--target", str(file.parent / "target"), "--requirement", str(file), *(["--no-deps"] if alone else [])),
    ]


def _missing(where: Path, name: str, machine: str, python: str, text: str) -> DrayError:
    if "Failed to fetch" in text:
        return lock.unsolved(str(where), text)
    return ConfigError(
        f"the lock lacks wheels for {machine} with Python {python}",
        where=where,
        wanted="a locked wheel of each package",
        found=re.sub(r"\n\s*", "\n", text.strip()),
        fix=f"dray image lock {name}; or change the requirement that has no such wheel",
    )
