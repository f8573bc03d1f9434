"""All files that the locks name, and dray's own wheel: gathered on the host, so that a build needs no index."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from dray import process
from dray.clients import progress
from dray.config.image import Image
from dray.contract.findings import ConfigError
from dray.images.fetch import pip, sha256
from dray.images.fetch.platforms import PLATFORMS
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
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Exactly the locked files: from the user's own `wheels`, from `folder`, or else from where pip looks."""
    if wheels and not wheels.is_dir():
        raise ConfigError("the folder of wheels does not exist", where=wheels)
    folder.mkdir(parents=True, exist_ok=True)
    versions = {vendor.name: vendor.version for vendor in image.vendor}
    locked = (pin for path in locks for pin in lock.read(path))
    pins = {pin.name: replace(pin, version=versions.get(pin.name, pin.version)) for pin in locked}
    files = _present(pins, [wheels, folder] if wheels else [folder], image.python)
    missing = [pins[name] for name in sorted(pins.keys() - {_name(path) for path in files})]
    if wheels:
        _refuse_others(missing, wheels, image.python)
    if missing:
        say(f"dray: fetch {len(missing)} of {len(pins)} packages")
    total = image.size.wheels_mb * 1_000_000 if image.size else 0
    present = sum(path.stat().st_size for path in files)
    indexes = {vendor.name: vendor.index for vendor in image.vendor}
    with progress.watch(folder, "wheels", total=max(0, total - present), say=say):
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
    made = folder / hashlib.sha256(lines.encode()).hexdigest()[:16]
    if not any(made.glob("*.whl")):
        shutil.rmtree(folder, ignore_errors=True)
        argv = [*pip.command("wheel"), "--quiet", *pip.hashed(lock.venv(checkout)), "--wheel-dir", str(made)]
        argv += [str(checkout)]
        process.run(argv, env={"SOURCE_DATE_EPOCH": _EPOCH, "DRAY_WHEEL": "image"})
    return next(made.glob("*.whl"))


def _present(pins: Mapping[str, Pin], folders: Sequence[Path], python: str) -> list[Path]:
    """The files in these folders that are locked and fit, each once."""
    paths = (path for folder in folders for path in sorted(folder.glob("*-*")))
    files = [path for path in paths if _name(path) in pins and path.is_file() and _fits(path, python)]
    present: dict[str, Path] = {}
    with ThreadPoolExecutor() as pool:
        for path, digest in zip(files, pool.map(sha256, files), strict=True):
            if digest in pins[_name(path)].hashes:
                present.setdefault(digest, path)
    return list(present.values())


def _refuse_others(missing: Sequence[Pin], wheels: Path, python: str) -> None:
    """Refuse a wheel in the user's folder with the right name and another hash: he expects it in the image."""
    for pin in missing:
        for path in wheels.glob(f"{pin.name.replace('-', '_')}-{pin.version}-*.whl"):
            if _fits(path, python):
                raise ConfigError(
                    "a wheel does not match its locked hash",
                    where=path,
                    wanted="\n".join(f"sha256 {digest}" for digest in pin.hashes),
                    found=f"sha256 {sha256(path)}",
                    fix="fetch the file again from its publisher, or remove it from the folder",
                )


def _name(path: Path) -> str:
    """The package that a file holds, written as in a lock."""
    return re.sub(r"[-_.]+", "-", path.name.partition("-")[0]).lower()


def _fits(path: Path, python: str) -> bool:
    """Whether a wheel is for this Python and this machine. Sources are for all."""
    if path.suffix != ".whl":
        return True
    digits = python.replace(".", "")
    interpreters, abi, systems = (part.split(".") for part in path.stem.split("-")[-3:])
    # One for the stable interface serves its own Python and every newer one.
    stable = abi == ["abi3"] and any(int(name[3:]) <= int(digits[1:]) for name in interpreters if name[:3] == "cp3")
    ours = stable or bool({f"cp{digits}", f"py{digits}", "py3"} & set(interpreters))
    machine = f"_{platform.machine()}"
    return ours and any(system == "any" or system.removesuffix(machine) in PLATFORMS for system in systems)
