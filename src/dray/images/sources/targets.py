"""For which machines and Pythons a lock holds a wheel of every package: one lock serves all of them."""

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
# Images are built with the first of their Pythons; sites and layers leave it behind.
_IMAGES, _HOSTS = ("3.11", "3.12"), ("3.11", "3.12", "3.13", "3.14")


def of_image(checkout: Path, image: Image) -> list[str]:
    """What serves an image. Vendors' wheels, which another index has, are left out.

    Where none takes part, no package is missing from the lock either.
    """
    folder = checkout / "containers" / image.variant
    locks = [path for path in (folder / "requirements.lock", folder / "build.lock") if path.exists()]
    pins = [pin for path in locks for pin in lock.read(path)]
    others = {lock.SOURCE_ONLY, *(vendor.name for vendor in image.vendor)}
    asked = {pin.name: pin for pin in pins if pin.name not in others}
    text = "".join(f"{pin}\n" for pin in asked.values())
    return _served(text, locks[0], image.variant, _IMAGES, alone=bool(image.vendor))


def of_hosts(checkout: Path) -> list[str]:
    """What serves the machines that submit, build and test."""
    path = venv.path(checkout)
    return _served(path.read_text(encoding="utf-8"), path, venv.NAME, _HOSTS, alone=True)


def _served(text: str, where: Path, name: str, pythons: Sequence[str], *, alone: bool) -> list[str]:
    """Ask the index, and fetch nothing: each package has a wheel for each target, whose hash is locked."""
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
        f"the lock does not serve {machine} with Python {python}",
        where=where,
        wanted="a wheel of each package whose hash is locked",
        found=re.sub(r"\n\s*", "\n", text.strip()),
        fix=f"dray image lock {name}; or change the requirement that has no such wheel",
    )
