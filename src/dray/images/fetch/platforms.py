"""Which wheels an image may hold. It needs Python's standard library alone: slurm/adopt.sh asks it in an image."""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dray.contract.findings import UnfitError
from dray.images.fetch import sha256
from dray.images.locks.lock import SOURCE_ONLY, Pin

# pip takes each platform at its word: manylinux_2_28 alone refuses a wheel for an older glibc.
PLATFORMS = (
    *(f"manylinux_2_{glibc}" for glibc in range(28, 4, -1)),
    *("manylinux2014", "manylinux2010", "manylinux1", "linux"),
)


def pip_options(python: str) -> list[str]:
    """pip's options for an image with this Python on this machine."""
    platforms = (word for name in PLATFORMS for word in ("--platform", f"{name}_{platform.machine()}"))
    return ["--implementation", "cp", "--python-version", python, *platforms]


def command(verb: str) -> list[str]:
    """The first words of every pip command."""
    if importlib.util.find_spec("pip") is None:
        fix = f"{shlex.quote(sys.executable)} -m ensurepip, then run the same command again"
        raise UnfitError("fetching wheels needs pip", where=sys.executable, fix=fix)
    return [sys.executable, "-m", "pip", verb, "--disable-pip-version-check", "--no-deps"]


def download_argv(*, requirements: Path, python: str, folder: Path) -> list[str]:
    """The command that fetches pinned files from where the host's pip looks."""
    return [
        *(*command("download"), "--progress-bar", "off", "--require-hashes"),
        *("--only-binary", ":all:", "--no-binary", SOURCE_ONLY, "--no-build-isolation", "--use-pep517"),
        *(*pip_options(python), "--requirement", str(requirements), "--dest", str(folder)),
    ]


def present(locked: Iterable[Pin], folders: Sequence[Path], python: str) -> tuple[list[Path], list[Pin]]:
    """The files in these folders that are locked and fit, each once, and the pins that have none."""
    pins = {pin.name: pin for pin in locked}
    paths = (path for folder in folders for path in sorted(folder.glob("*-*")))
    files = [path for path in paths if _name(path) in pins and path.is_file() and fits(path, python)]
    kept: dict[str, Path] = {}
    with ThreadPoolExecutor() as pool:
        for path, digest in zip(files, pool.map(sha256, files), strict=True):
            if digest in pins[_name(path)].hashes:
                kept.setdefault(digest, path)
    absent = pins.keys() - {_name(path) for path in kept.values()}
    return list(kept.values()), [pins[name] for name in sorted(absent)]


def fits(path: Path, python: str) -> bool:
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


def _name(path: Path) -> str:
    """The package that a file holds, written as in a lock."""
    return re.sub(r"[-_.]+", "-", path.name.partition("-")[0]).lower()
