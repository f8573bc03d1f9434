"""The folder of an adopted image: a link to it, its description and record, and the packages that it lacks.

`dray image adopt` imports this file with the user's own Python. slurm/adopt.sh starts it in the image, where pydantic
and all other packages may be missing. So it uses Python's standard library alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from dray import __version__, process
from dray.contract import unexpected
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images.fetch import platforms, sha256
from dray.images.locks import lock
from dray.images.locks.lock import Pin

IMAGE, SOURCE, DESCRIBED = "image.sif", "source", "image.json"
"""Files in the folder: the SIF, or a link to it; a link to the file that the user named; the description of both."""
VARIANTS = ("cpu", "cuda", "cuda12", "rocm", "rocm6")
"""Of dray's own images: no adopted image has such a name."""
# The oldest Python and glibc that dray runs on.
_PYTHON, _LIBC = (3, 11), (2, 28)
# dray's requirements that only hosts need.
_HOSTS = {"docker", "spython"}
# Imports dray's planner and runner.
_START = ("-B", "-c", "import dray.cli.app, dray.cli.plan, dray.runner.__main__, dray.tcp_store.handler")


def _require(found: Mapping[str, Any], source: str) -> None:
    """Refuse an image on which dray cannot run."""
    kind, _, version = found["libc"].partition(" ")
    for holds, problem, wanted, has in (
        (numbers(found["python"]) >= _PYTHON, "the image's Python is too old for dray", "Python 3.11 or newer",
         found["python"]),
        (kind == "glibc" and numbers(version) >= _LIBC, "the image has no glibc that torch's wheels can use",
         "glibc 2.28 or newer", found["libc"] or "another C library, such as musl"),
        ("error" not in found["torch"], "the image's Python cannot import torch", "torch, which starts the ranks",
         found["torch"].get("error")),
    ):  # fmt: skip
        if not holds:
            fix = "take a newer image, or build dray's own (dray image build)"
            raise ConfigError(problem, where=source, wanted=wanted, found=has, fix=fix)


def fill(
    folder: Path,
    found: Mapping[str, Any],
    *,
    name: str,
    source: str,
    file: str,
    sha256: str,
    checkout: Path,
    start: Callable[[Sequence[str], str], process.Done],
) -> tuple[str, ...]:
    """Write all files of the folder but the image. Returns the packages that were added, with their versions.

    `source` is the path of a SIF, or the address that dray fetched; `file` is that file's owner, inode, size and time,
    from `stat`. `start` starts the image's Python with these arguments and PYTHONPATH: dray must start there.
    """
    _require(found, source)
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = _packages(folder, found, project["dependencies"], checkout, source)
    _register(folder, project["entry-points"])
    size = file.partition(" bytes")[0].split()[-1]  # in the image its own file is not seen
    described = {
        "name": name,
        "variant": variant(found["torch"]),
        "pythonpath": found["pythonpath"],
        "source": source,
        "file": file,
        "python": ".".join(found["python"].split(".")[:2]),
        "packages": {**found["packages"], **brought},
    }
    record = {
        "variant": described["variant"],
        "dray": __version__,
        "base": source,
        "inputs": hashlib.sha256(json.dumps(described).encode()).hexdigest(),
        "epoch": 0,
        "tools": versions(found),
        "sif": {"sha256": sha256, "size": int(size)},
    }
    for path, content in ((DESCRIBED, described), (f"{IMAGE}.json", record)):
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / path).write_text(f"{text}\n", encoding="utf-8")
    done = start(_START, python_path(folder, checkout / "src", found["pythonpath"]))
    if done.code:
        raise UnfitError(
            "dray does not start in the image",
            where=source,
            found=last_lines(done),
            fix="take another image: the last line says what is missing or does not fit",
        )
    return tuple(f"{package} {version}" for package, version in brought.items())


def python_path(folder: Path, source: Path, theirs: str) -> str:
    """PYTHONPATH in an adopted image: the packages beside it, dray's source, then the image's own value."""
    return ":".join(filter(None, [str(folder), str(source), theirs]))


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


def _register(folder: Path, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """torchrun finds dray's rendezvous by an installed package's metadata; dray itself is the checkout's source."""
    installed = folder / f"dray-{__version__}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dray\nVersion: {__version__}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (installed / "entry_points.txt").write_text("".join(f"{line}\n" for line in lines))


def _packages(
    folder: Path, found: Mapping[str, Any], asked: Iterable[str], checkout: Path, source: str
) -> dict[str, str]:
    """Add what the image lacks, by the hashes of venv.lock. Each added wheel names the packages that it needs."""
    pins = {pin.name: pin for pin in lock.read(lock.venv(checkout))}
    python = ".".join(found["python"].split(".")[:2])
    ours = checkout / "build" / "wheels"
    name = f"beside-{python}"
    places = [ours / name, ours]
    if not os.access(ours.parent, os.W_OK):
        places.insert(0, folder.parent / "wheels" / name)
    has = dict(found["packages"])
    brought: dict[str, str] = {}
    while names := list(dict.fromkeys(_missing(asked, has, pins))):
        for wheel in _wheels([pins[name] for name in names], python, places, source):
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


def _missing(asked: Iterable[str], has: Mapping[str, str], pins: Mapping[str, Pin]) -> Iterator[str]:
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


def _wheels(pins: Sequence[Pin], python: str, places: Sequence[Path], source: str) -> list[Path]:
    """The pinned wheels. The first place keeps them for the next image with this Python."""
    wheels, absent = platforms.present(pins, places, python)
    if absent:
        try:
            _fetch(absent, python, places[0])
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
        wheels, _ = platforms.present(pins, places, python)
    return wheels


def _fetch(pins: Sequence[Pin], python: str, files: Path) -> None:
    """Fetch with the image's or the user's own pip and its configuration. It runs no package's code."""
    files.mkdir(parents=True, exist_ok=True)
    # A folder of its own first: another job may fetch the same wheels.
    with TemporaryDirectory(dir=files, prefix=".fetch-") as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        process.run(
            [
                *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--quiet"),
                *("--progress-bar", "off", "--require-hashes", "--only-binary", ":all:", "--retries", "1"),
                *("--timeout", "10", *platforms.pip_options(python)),
                *("--requirement", str(requirements), "--dest", scratch),
            ]
        )
        for wheel in Path(scratch).glob("*.whl"):
            wheel.replace(files / wheel.name)


def _start(arguments: Sequence[str], path: str) -> process.Done:
    return process.run([sys.executable, *arguments], env={"PYTHONPATH": path}, check=False)


def last_lines(done: process.Done) -> str:
    """The last lines of stderr, without the engine's warnings about folders that the image lacks."""
    lines = [line for line in done.err.splitlines() if line.strip() and not line.startswith(("WARNING:", "INFO:"))]
    return "\n".join(lines[-3:])


def named(source: str) -> str:
    """pytorch of docker://nvcr.io/nvidia/pytorch:26.01-py3, and of /images/pytorch.sif."""
    last = source.rstrip("/").rpartition("/")[2].partition("@")[0].partition(":")[0]
    return re.sub("[^a-z0-9_-]+", "-", re.sub(r"[.](sif|tar|tgz|tar[.]gz)$", "", last.lower())).strip("-_")[:63]


def require_name(name: str) -> None:
    """Refuse what no adopted image can be called."""
    if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,62}", name) or name in VARIANTS:
        raise ConfigError(
            "not a name for an adopted image",
            wanted=f"lower-case letters, digits, _ and -, but not {', '.join(VARIANTS)}",
            found=name or "no name",
            fix="--name mine",
        )


def open_to(mode: int, folder: int) -> str:
    """Why users other than the owner may change or replace a file with this mode in such a folder, or nothing."""
    if mode & 0o022:
        return f"its mode is {mode & 0o7777:o}"
    return f"its folder has the mode {folder:o}" if folder & 0o002 and not folder & 0o1000 else ""


class Adoption:
    """One SIF that becomes an adopted image, in a job or at a login node. The image's own Python runs this."""

    def __init__(self, checkout: Path, runs: Path, source: Path) -> None:
        self.checkout, self.source = checkout, source
        self.homes = (checkout / "build", runs / ".adopted")

    def find(self, name: str) -> Path | None:
        """The folder of the image that was adopted under this name."""
        folders = (home / f"dray-{name}" for home in self.homes)
        return next((folder for folder in folders if (folder / DESCRIBED).exists()), None)

    def of_source(self) -> Path | None:
        """The folder of the image that was adopted from this file."""
        links = (link for home in self.homes for link in home.glob(f"dray-*/{SOURCE}"))
        return next((link.parent for link in links if os.readlink(link) == str(self.source)), None)  # noqa: PTH115

    def free_name(self) -> str:
        """The file's own name; with a number that its path gives, if an image has that name."""
        name = named(self.source.name)[:50]
        if not name or name in VARIANTS or self.find(name):
            name = f"{name or 'image'}-{hashlib.sha256(str(self.source).encode()).hexdigest()[:8]}"
        return name

    def home(self) -> Path:
        """The folder for adopted images: the checkout's, or beside the runs if that cannot be written."""
        for home in self.homes:
            with suppress(OSError):
                home.mkdir(parents=True, exist_ok=True)
                if os.access(home, os.W_OK):
                    return home
        raise ConfigError(
            "no folder can be written for an adopted image",
            where=" and ".join(map(str, self.homes)),
            fix="set DRAY_RUNS to a folder that you may write and that all nodes share",
        )

    def make(self, *, name: str, force: bool, file: str, folder_mode: int) -> Path:
        """The image. One rename gives its folder the name; another job may be making it too."""
        began = time.monotonic()
        earlier = self.find(name) if name else self.of_source()
        if earlier and not force:
            if not name:
                return earlier / IMAGE
            fix = f"give another one: --name {name}-2; or replace it: --force"
            raise ConfigError("there is an image of this name", where=earlier, fix=fix)
        name = name or (earlier.name.removeprefix("dray-") if earlier else self.free_name())
        require_name(name)
        os.umask(0o022)  # what is not private in it, other users of the checkout may use
        folder = earlier or self.home() / f"dray-{name}"
        print(f"dray: adopt {self.source}", file=sys.stderr)
        with TemporaryDirectory(dir=folder.parent, prefix=".adopt-") as scratch:
            os.environ["TMPDIR"] = scratch  # pip's: the container's own is small
            new = Path(scratch) / "new"
            new.mkdir()
            self.fill(new, name=name, file=file, others=open_to(self.source.stat().st_mode, folder_mode))
            if earlier:
                earlier.rename(Path(scratch) / "old")
            try:
                new.rename(folder)
            except OSError as error:
                if self.of_source() != folder:  # else another job was quicker
                    fix = "give another: slurm/dray image adopt FILE --name NAME"
                    raise UnfitError("the adopted image does not get its name", where=folder, fix=fix) from error
        print(f"dray: adopted in {time.monotonic() - began:.0f} s: adopted={name}", file=sys.stderr)
        return folder / IMAGE

    def fill(self, folder: Path, *, name: str, file: str, others: str) -> None:
        """Link or copy the image, and look at what it has and lacks."""
        began = time.monotonic()
        (folder / SOURCE).symlink_to(self.source)
        if others:
            print(f"  it is copied, since others may write it: {others}", file=sys.stderr)
            shutil.copyfile(self.source, folder / IMAGE)
        else:
            (folder / IMAGE).symlink_to(SOURCE)
        digest = sha256(folder / IMAGE)
        print(f"  read in {time.monotonic() - began:.0f} s: sha256:{digest}", file=sys.stderr)
        look = (self.checkout / "src" / "dray" / "checks" / "list_packages.py").read_text(encoding="utf-8")
        found = json.loads(process.run([sys.executable, "-c", look]).out)
        brought = fill(
            folder, found, name=name, source=str(self.source), file=file, sha256=digest, checkout=self.checkout,
            start=_start,
        )  # fmt: skip
        about = ", ".join(f"{name} {version}" for name, version in versions(found).items())
        print(f"  {about}" + (f"\n  added beside it: {', '.join(brought)}" if brought else ""), file=sys.stderr)


def main() -> None:
    """Print the adopted image. slurm/adopt.sh knows what the container does not show: owners, and the file's folder."""
    parser = argparse.ArgumentParser(prog="slurm/dray image adopt", usage="%(prog)s FILE [--name NAME] [--force]")
    for word in ("checkout", "runs", "source"):
        parser.add_argument(word, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("file", help=argparse.SUPPRESS)
    parser.add_argument("folder_mode", type=lambda mode: int(mode, 8), help=argparse.SUPPRESS)
    parser.add_argument("--name", default="")
    parser.add_argument("--force", action="store_true")
    given = parser.parse_args()
    try:
        adoption = Adoption(given.checkout, given.runs, given.source)
        image = adoption.make(name=given.name, force=given.force, file=given.file, folder_mode=given.folder_mode)
    except Exception as raised:
        error = unexpected.error(raised)
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(image)
