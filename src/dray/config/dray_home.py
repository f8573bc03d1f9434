"""The folder of dray's own files: containers/, recipes/, slurm/, build/."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

from dray.contract import files
from dray.contract.findings import ConfigError

_MARK = "containers/steps"
_PACKAGE = Path(__file__).resolve().parents[1]
_CLONE = _PACKAGE.parents[1]
_INSTALLED = _PACKAGE / "checkout"  # in a wheel alone (hatch_build.py)


def root(*, build: bool = False) -> Path:
    """The checkout: DRAY_HOME, else the clone that this package is in, else the working folder or one above it that is
    this user's or root's, else the wheel's own. `build`: writable.
    """
    named = os.environ.get("DRAY_HOME")
    if named:
        if (Path(named) / _MARK).is_dir():
            return Path(named).resolve()
        raise ConfigError("DRAY_HOME is not a dray checkout", found=named, wanted=f"a folder with {_MARK}/ in it")
    folder = Path.cwd().resolve()
    above = [place for place in (folder, *folder.parents) if (place / _MARK).is_dir()]
    trusted = [place for place in above if all(map(files.is_own, (place, place / "containers", place / _MARK)))]
    for candidate in (_CLONE, *trusted, *([] if build else [_INSTALLED])):
        if (candidate / _MARK).is_dir():
            return candidate
    raise ConfigError(
        "no dray checkout found",
        where=folder,
        wanted=f"a folder of yours or root's with {_MARK}/ in it, to which not everybody may write",
        found=f"{above[0]}, which another user may change" if above else "",
        fix="dray init FOLDER && cd FOLDER; or change into your clone of dray, or set DRAY_HOME to it",
    )


def home() -> Path:
    """The user's home; /nonexistent for a user id without one, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def configuration() -> Path:
    """The folder of the user's settings for dray."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "dray"


def write(folder: Path) -> None:
    """Write a new checkout, which builds images with the same bytes as the checkout of this package.

    An image has dray's wheel, which contains README.md and LICENSE; and messages name `make image-VARIANT`.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError("a file has the name of the new folder", where=folder, fix="give another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError("the folder is not empty", where=folder, fix="give the name of a new folder")
    source = _INSTALLED if _INSTALLED.is_dir() else _CLONE
    if not (source / "pyproject.toml").is_file():  # an image holds the package alone
        fix = "copy your clone of dray; or type dray init where dray is installed by pip or uv"
        raise ConfigError("this dray has no files to write a checkout from", where=_PACKAGE, fix=fix)
    hook = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in hook["custom"]["files"]:
            _copy(source / name, folder / name)
        _copy(_PACKAGE, folder / "src" / "dray")
    except OSError as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        fix = "name a folder to which you may write, on a disk with free space"
        raise ConfigError("the checkout cannot be written", where=folder, found=str(error)[:200], fix=fix) from error


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        # The package's own copy of the checkout and bytecode stay behind.
        ignored = shutil.ignore_patterns("__pycache__", _INSTALLED.name if source == _PACKAGE else "")
        shutil.copytree(source, target, ignore=ignored)
    else:
        shutil.copy(source, target)
