"""Wheels are fetched on the host, once, with the host's own pip configuration; the build itself then needs neither."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from dray import process
from dray.errors import DrayError, UnfitError

# pip takes each platform at its word: manylinux_2_28 alone refuses a wheel for an older glibc.
_PLATFORMS = tuple(
    f"{tag}_x86_64"
    for tag in (
        *(f"manylinux_2_{glibc}" for glibc in (28, 27, 26, 24, 17)),
        "manylinux2014",
        *(f"manylinux_2_{glibc}" for glibc in (12, 5)),
        "linux",
    )
)
# An empty configuration, so that "are they all there" asks no index.
_NO_CONFIG = {"PIP_CONFIG_FILE": os.devnull}


def download_argv(*, lock: Path, python: str, folder: Path) -> list[str]:
    """What fetches every locked wheel, wherever the host's pip looks for wheels."""
    return [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"),
        *("--require-hashes", "--only-binary", ":all:", "--implementation", "cp", "--python-version", python),
        *(word for platform in _PLATFORMS for word in ("--platform", platform)),
        *("--requirement", str(lock), "--dest", str(folder)),
    ]


def fetch(*, lock: Path, python: str, folder: Path) -> bool:
    """Have every wheel of the lock in `folder`, with the right hash; whether anything had to be fetched."""
    _need_pip()
    folder.mkdir(parents=True, exist_ok=True)
    argv = download_argv(lock=lock, python=python, folder=folder)
    there = [*argv, "--isolated", "--no-index", "--find-links", str(folder)]
    if process.run(there, env=_NO_CONFIG, check=False).code == 0:
        return False
    done = process.run(argv, check=False)
    if done.code != 0:
        said = [line for line in done.err.splitlines() if not line.startswith(("WARNING:", "[notice]"))]
        raise DrayError(
            "pip cannot fetch the locked wheels",
            where=lock,
            wanted="every package of the lock, with one of its hashes",
            found="\n".join(said) or f"exit code {done.code}",
            fix=_fix("\n".join(said)),
        )
    return True


def own(*, checkout: Path, folder: Path) -> Path:
    """dray's own wheel, made again when its sources are newer."""
    sources = [
        *(checkout / name for name in ("pyproject.toml", "README.md", ".gitignore")),
        *(checkout / "src").rglob("*.py"),
    ]
    newest = max(source.stat().st_mtime for source in sources if source.exists())
    made = next(folder.glob("*.whl"), None)
    if made and made.stat().st_mtime > newest:
        return made
    _need_pip()
    shutil.rmtree(folder, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet", "--no-deps")
    process.run([*pip, "--wheel-dir", folder, checkout])
    return next(folder.glob("*.whl"))


def _need_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise UnfitError(
            "fetching wheels needs pip", where=sys.executable, fix=f"{sys.executable} -m ensurepip, then again"
        )


def _fix(said: str) -> str:
    if "torch==" in said:
        return (
            "this lock takes one build of torch, which main registries may not have: show pip the folder or the\n"
            "index that has it, as in: pip config set global.find-links FOLDER"
        )
    if "DO NOT MATCH THE HASHES" in said:
        return "a mirror or a cache hands out another file under this name: pip cache purge, or lock again"
    return "pip config list shows where pip looks; a proxy or a mirror may be missing there"
