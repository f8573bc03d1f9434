"""The folder beside an adopted image: dray, and what dray needs and the image has not."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from dray import process
from dray.contract.findings import DrayError, UnfitError
from dray.images.sources import arrival, inputs, lock, pip, venv, wheels

# Of dray's own requirements, those that only hosts need.
_HOSTS = {"docker", "spython"}


def fill(folder: Path, found: Mapping[str, Any], *, checkout: Path, source: str) -> tuple[str, ...]:
    """Put them there; the packages, with their versions."""
    brought = _packages(folder, found, checkout, source)
    build = checkout / "build"
    with inputs.alone(build):
        _unpack(wheels.own(checkout=checkout, folder=build / "wheels" / "dray"), folder)
    return brought


def digest(folder: Path) -> str:
    """Of everything in it."""
    lines = (f"{digest}  {name}\n" for name, digest in arrival.sums(folder).items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def numbers(version: str) -> tuple[int, ...]:
    """The first three, to compare; without what a vendor adds, such as +cu130."""
    with suppress(ValueError):
        return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return ()


def _packages(folder: Path, found: Mapping[str, Any], checkout: Path, source: str) -> tuple[str, ...]:
    """By the hashes of venv.lock, for the image's own Python."""
    pins = {pin.name: pin for pin in lock.read(venv.path(checkout))}
    names = list(dict.fromkeys(_missing("dray", found["packages"], pins)))
    if not names:
        return ()
    python = ".".join(found["python"].split(".")[:2])
    with TemporaryDirectory(dir=folder.parent, prefix=".wheels-") as scratch:
        requirements, files = Path(scratch) / "requirements", Path(scratch) / "files"
        requirements.write_text("".join(f"{pins[name]}\n" for name in names), encoding="utf-8")
        files.mkdir()
        try:
            process.run(pip.download_argv(requirements=requirements, python=python, folder=files))
        except DrayError as error:
            raise UnfitError(
                "the image lacks packages that dray needs, and pip cannot fetch them",
                where=source,
                wanted=f"wheels for Python {python}: {', '.join(f'{name} {pins[name].version}' for name in names)}",
                found=error.finding.found,
                fix="pip config list shows where pip looks; or take an image that has pydantic, rich, typer and PyYAML",
            ) from error
        for wheel in sorted(files.iterdir()):
            _unpack(wheel, folder)
    return tuple(f"{name} {pins[name].version}" for name in names)


def _missing(package: str, has: Mapping[str, str], pins: Mapping[str, lock.Pin]) -> Iterator[str]:
    """What this package requires and the image has not, or not in that version, with all that those require."""
    for requirement in importlib.metadata.requires(package) or ():
        wanted, _, marker = requirement.partition(";")
        matched = re.match(r"[A-Za-z0-9._-]+", wanted)
        if not matched or marker:  # extras, other systems, older Pythons
            continue
        name = re.sub(r"[-_.]+", "-", matched[0]).lower()
        if name not in _HOSTS and name in pins and not _fits(wanted[matched.end() :], has.get(name)):
            yield name
            yield from _missing(name, has, pins)


def _fits(wanted: str, version: str | None) -> bool:
    """Whether a version is new enough, or the very one; an upper bound is for new resolutions."""
    if version is None:
        return False
    exact, oldest = re.search(r"==([\w.]+)", wanted), re.search(r">=([\w.]+)", wanted)
    if exact:
        return version == exact[1]
    return not oldest or numbers(version) >= numbers(oldest[1])


def _unpack(wheel: Path, folder: Path) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
