"""The folder of an adopted image: a link to it, its description and record, and the packages that it lacks.

`dray image adopt` imports this file with the user's own Python. slurm/adopt.sh starts it in the image, where pydantic
and all other packages may be missing. So it uses Python's standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from dray import __version__, process
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images.fetch.platforms import PLATFORMS

IMAGE, SOURCE, DESCRIBED = "image.sif", "source", "image.json"
"""Files in the folder: the SIF, or a link to it; a link to the file that the user named; the description of both."""
# The oldest Python and glibc that dray runs on.
_PYTHON, _LIBC = (3, 11), (2, 28)
# dray's requirements that only hosts need.
_HOSTS = {"docker", "spython"}
_START = "import dray.cli, dray.cli.plan, dray.runner.__main__, dray.tcp_store.handler"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the image came from, and how dray sees that its file is unchanged."""

    name: str
    source: str
    """The path of a SIF, or the address that dray fetched: docker://..."""
    file: str
    """That file's owner, inode, size and time, from `stat`."""
    sha256: str
    size: int


def require(found: Mapping[str, Any], source: str) -> None:
    """Refuse an image on which dray cannot run."""
    kind, _, version = str(found["libc"]).partition(" ")
    for holds, problem, wanted, has in (
        (numbers(found["python"]) >= _PYTHON, "the image's Python is too old for dray", "Python 3.11 or newer",
         found["python"]),
        (kind == "glibc", "the image has no glibc, which torch's wheels need", "glibc 2.28 or newer",
         found["libc"] or "another C library, such as musl"),
        (numbers(version) >= _LIBC, "the image's glibc is too old", "glibc 2.28 or newer, which torch's wheels need",
         found["libc"]),
        ("error" not in found["torch"], "the image's Python cannot import torch", "torch, which starts the ranks",
         found["torch"].get("error")),
    ):  # fmt: skip
        if not holds:
            fix = "take a newer image, or build dray's own (dray image build)"
            raise ConfigError(problem, where=source, wanted=wanted, found=has, fix=fix)


def fill(folder: Path, found: Mapping[str, Any], origin: Origin, *, checkout: Path) -> tuple[str, ...]:
    """Write all files of the folder but the image. Returns the packages that were added, with their versions."""
    brought = _packages(folder, found, checkout, origin.source)
    _register(folder, checkout)
    described = {
        "name": origin.name,
        "variant": variant(found["torch"]),
        "pythonpath": found["pythonpath"],
        "source": origin.source,
        "file": origin.file,
        "python": ".".join(found["python"].split(".")[:2]),
        "packages": {**found["packages"], **brought},
    }
    record = {
        "variant": described["variant"],
        "dray": __version__,
        "base": origin.source,
        "inputs": _digest(folder),
        "epoch": 0,
        "tools": versions(found),
        "sif": {"sha256": origin.sha256, "size": origin.size},
    }
    for name, content in ((DESCRIBED, described), (f"{IMAGE}.json", record)):
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
    return tuple(f"{name} {version}" for name, version in brought.items())


def python_path(folder: Path, source: Path, theirs: str) -> str:
    """PYTHONPATH in an adopted image: the packages beside it, dray's source, then the image's own value."""
    return ":".join(filter(None, [str(folder), str(source), theirs]))


def starts(code: int, last_lines: str, source: str) -> None:
    """Refuse an image in which dray's planner and runner did not start."""
    if code:
        raise UnfitError(
            "dray does not start in the image", where=source, found=last_lines,
            fix="take another image: the last line says what is missing or does not fit",
        )  # fmt: skip


def start_argv(python: str) -> list[str]:
    """The command that imports dray's planner and runner."""
    return [python, "-B", "-c", _START]


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, to compare; a vendor's ending such as +cu130 is left out."""
    with suppress(ValueError):
        return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return ()


def variant(torch: Mapping[str, str]) -> str:
    """The variant of dray's own images that this image replaces."""
    if torch["hip"]:
        return "rocm" if numbers(torch["hip"]) >= (7,) else "rocm6"
    if torch["cuda"]:
        return "cuda" if numbers(torch["cuda"]) >= (13,) else "cuda12"
    return "cpu"


def versions(found: Mapping[str, Any]) -> dict[str, str]:
    """The versions that the record holds and `dray image adopt` prints."""
    torch, packages = found["torch"], found["packages"]
    named = {
        "python": f"{found['python']}, {found['executable']}",
        "libc": found["libc"],
        "torch": torch["version"],
        "CUDA": torch["cuda"],
        "ROCm": torch["hip"],
        "RCCL" if torch["hip"] else "NCCL": torch.get("nccl", ""),
        **{name: packages.get(name, "") for name in ("transformers", "accelerate", "deepspeed", "datasets", "triton")},
    }
    return {name: version for name, version in named.items() if version}


def _digest(folder: Path) -> str:
    """One digest of everything in the folder but the image."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (IMAGE, SOURCE):
            digest.update(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n".encode())
    return digest.hexdigest()


def _register(folder: Path, checkout: Path) -> None:
    """torchrun finds dray's rendezvous by an installed package's metadata; dray itself is the checkout's source."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = folder / f"dray-{__version__}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dray\nVersion: {__version__}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (installed / "entry_points.txt").write_text("".join(f"{line}\n" for line in lines))


def _packages(folder: Path, found: Mapping[str, Any], checkout: Path, source: str) -> dict[str, str]:
    """Add what the image lacks, by the hashes of venv.lock. Each added wheel names the packages that it needs."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = _pins(checkout / "containers" / "venv.lock")
    python = ".".join(found["python"].split(".")[:2])
    kept = checkout / "build" / "wheels"
    files = (kept if os.access(kept.parent, os.W_OK) else folder.parent / "wheels") / f"beside-{python}"
    has = dict(found["packages"])
    brought: dict[str, str] = {}
    asked: Iterable[str] = project["dependencies"]
    while names := list(dict.fromkeys(_missing(asked, has, pins))):
        for wheel in _fetched([pins[name] for name in names], python, files, checkout, source):
            with ZipFile(wheel) as archive:
                archive.extractall(folder)
        brought |= {name: pins[name].version for name in names}
        has |= brought
        asked = [
            requirement
            for installed in importlib.metadata.distributions(path=[str(folder)])
            for requirement in installed.requires or ()
        ]
    return dict(sorted(brought.items()))


@dataclass(frozen=True)
class _Pin:
    name: str
    version: str
    text: str
    hashes: frozenset[str]


def _pins(lock: Path) -> dict[str, _Pin]:
    found = {}
    for line in lock.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if matched := re.match(r"([a-z0-9-]+)==(\S+) ", line):
            hashes = frozenset(re.findall(r"sha256:([0-9a-f]{64})", line))
            found[matched[1]] = _Pin(matched[1], matched[2], " ".join(line.split()), hashes)
    return found


def _missing(asked: Iterable[str], has: Mapping[str, str], pins: Mapping[str, _Pin]) -> Iterator[str]:
    """The required packages that the image lacks, or has in a version that does not fit."""
    for requirement in asked:
        wanted, _, marker = requirement.partition(";")
        matched = re.match(r"[A-Za-z0-9._-]+", wanted)
        if not matched or marker:  # extras, other systems, older Pythons
            continue
        name = re.sub(r"[-_.]+", "-", matched[0]).lower()
        if name not in _HOSTS and name in pins and not _fits(wanted[matched.end() :], has.get(name)):
            yield name


def _fits(wanted: str, version: str | None) -> bool:
    """Whether a version satisfies == or >=. Upper bounds count only when a lock is resolved."""
    if version is None:
        return False
    exact, oldest = re.search(r"==([\w.]+)", wanted), re.search(r">=([\w.]+)", wanted)
    if exact:
        return version == exact[1]
    return not oldest or numbers(version) >= numbers(oldest[1])


def _fetched(pins: Sequence[_Pin], python: str, files: Path, checkout: Path, source: str) -> list[Path]:
    """The pinned wheels. `files` keeps them for the next image with this Python."""
    ours = checkout / "build" / "wheels"
    places = (files, ours / files.name, ours)
    absent = [pin for pin in pins if not _kept(pin, python, places)]
    if absent:
        files.mkdir(parents=True, exist_ok=True)
        try:
            _fetch(absent, python, files)
        except DrayError as error:
            raise UnfitError(
                "the image lacks packages that dray needs, and pip cannot fetch them",
                where=source,
                wanted=f"wheels for Python {python}: {', '.join(f'{pin.name} {pin.version}' for pin in absent)}",
                found=error.finding.found,
                fix=f"on a machine with a network, such as a login node: slurm/dray image adopt {shlex.quote(source)}\n"
                f"or, if the image has no pip: make install && .venv/bin/dray image adopt {shlex.quote(source)}\n"
                "or take an image with pydantic, rich, typer and PyYAML",
            ) from error
    wheels = {pin.name: _kept(pin, python, places) for pin in pins}
    if lacking := [name for name, wheel in wheels.items() if wheel is None]:
        raise UnfitError("pip fetched no wheel that fits the image", where=source, found=", ".join(lacking))
    return [wheel for wheel in wheels.values() if wheel]


def _fetch(pins: Sequence[_Pin], python: str, files: Path) -> None:
    """Fetch into a folder of its own first: another job may fetch the same wheels."""
    with TemporaryDirectory(dir=files, prefix=".fetch-") as own:
        requirements = Path(own, "requirements.txt")
        requirements.write_text("".join(f"{pin.text}\n" for pin in pins), encoding="utf-8")
        process.run(_download(requirements, python, Path(own)))
        for wheel in Path(own).glob("*.whl"):
            wheel.replace(files / wheel.name)


def _kept(pin: _Pin, python: str, places: Iterable[Path]) -> Path | None:
    """The wheel, from the first of these folders that has it. The last folder is the one of dray's own images."""
    tags = (f"-cp{python.replace('.', '')}-", "py3-none-any.")
    for path in (path for place in places for path in place.glob(f"*-{pin.version}-*.whl")):
        if any(tag in path.name for tag in tags) and hashlib.sha256(path.read_bytes()).hexdigest() in pin.hashes:
            return path
    return None


def _download(requirements: Path, python: str, files: Path) -> list[str]:
    """The command of the image's or the user's own pip, with its own configuration. It runs no package's code."""
    return [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--quiet"),
        *("--progress-bar", "off", "--require-hashes", "--only-binary", ":all:", "--retries", "1", "--timeout", "10"),
        *("--implementation", "cp", "--python-version", python),
        *(word for name in PLATFORMS for word in ("--platform", f"{name}_{platform.machine()}")),
        *("--requirement", str(requirements), "--dest", str(files)),
    ]


def main() -> None:
    """Run in the image with CHECKOUT FOLDER NAME SOURCE FILE SHA256 SIZE; stdin is the output of checks/adopted.py."""
    checkout, folder = Path(sys.argv[1]), Path(sys.argv[2])
    name, source, file, sha256, size = sys.argv[3:]
    try:
        found = json.load(sys.stdin)
        require(found, source)
        origin = Origin(name=name, source=source, file=file, sha256=sha256, size=int(size))
        brought = fill(folder, found, origin, checkout=checkout)
        path = python_path(folder, checkout / "src", found["pythonpath"])
        started = process.run(start_argv(sys.executable), env={"PYTHONPATH": path}, check=False)
        starts(started.code, "\n".join(started.err.splitlines()[-3:]), source)
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    about = ", ".join(f"{name} {version}" for name, version in versions(found).items())
    print(f"  {about}" + (f"\n  added beside it: {', '.join(brought)}" if brought else ""), file=sys.stderr)
