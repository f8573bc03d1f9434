"""For which machines and Pythons a lock holds a wheel of every package: one lock serves all of them."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.config.image import Image
from dray.contract.findings import ConfigError
from dray.images.sources import lock

# Images are built with the first Python of these; sites and layers leave it behind.
MACHINES, PYTHONS = ("x86_64", "aarch64"), ("3.11", "3.12")
_PLATFORM = "manylinux_2_28"


def require_wheels(checkout: Path, image: Image) -> list[str]:
    """Ask the index, and fetch nothing: every package has a wheel for each target, whose hash is locked.

    Vendors' wheels, which another index has, are left out. Where none takes part, nothing is missing from the lock.
    """
    folder = checkout / "containers" / image.variant
    locks = [path for path in (folder / "requirements.lock", folder / "build.lock") if path.exists()]
    pins = [pin for path in locks for pin in lock.read(path)]
    others = {lock.SOURCE_ONLY, *(vendor.name for vendor in image.vendor)}
    asked = {pin.name: pin for pin in pins if pin.name not in others}
    found = []
    with TemporaryDirectory(prefix="dray-") as scratch:
        file = Path(scratch) / "requirements.lock"
        file.write_text("".join(f"{pin}\n" for pin in asked.values()))
        for machine, python in product(MACHINES, PYTHONS):
            argv = _argv(file, machine, python, alone=bool(image.vendor))
            done = process.run(argv, env=lock.UV_ENVIRONMENT, check=False)
            if done.code != 0:
                raise _missing(image, machine, python, done.err)
            found.append(f"{len(asked)} wheels for {machine}, Python {python}")
    return found


def _argv(file: Path, machine: str, python: str, *, alone: bool) -> list[str]:
    return [
        *(lock.uv(), "pip", "install", "--quiet", "--dry-run", "--require-hashes", "--only-binary", ":all:"),
        *("--python-version", python, "--python-platform", f"{machine}-{_PLATFORM}"),
        *("--target", str(file.parent / "target"), "--requirement", str(file), *(["--no-deps"] if alone else [])),
    ]


def _missing(image: Image, machine: str, python: str, text: str) -> Exception:
    where = f"containers/{image.variant}/requirements.lock"
    if "Failed to fetch" in text:
        return lock.unsolved(where, text)
    return ConfigError(
        f"the lock does not serve {machine} with Python {python}",
        where=where,
        wanted="a wheel of each package whose hash is locked",
        found=re.sub(r"\n\s*", "\n", text.strip()),
        fix=f"dray image lock {image.variant}; or change the requirement that has no such wheel",
    )
