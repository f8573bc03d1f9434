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
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from dray import __version__, interrupts, process
from dray.contract import exit_codes, failures
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
# The exit code of a failure without a code of its own, as in sysexits.h; slurm/adopt.sh knows it.
_DEFECT = 70
# Imports dray's planner and runner.
_START = (
    "-B",
    "-c",
    "import dray.cli.app, dray.cli.run, dray.planning.missing_facts, dray.runner.__main__, dray.tcp_store.handler",
)


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
    python = ".".join(found["python"].split(".")[:2])
    brought = _packages(folder, found["packages"], project["dependencies"], checkout, source=source, python=python)
    _register(folder, project["entry-points"])
    size = file.partition(" bytes")[0].split()[-1]  # in the image its own file is not seen
    described = {
        "name": name,
        "variant": variant(found["torch"]),
        "pythonpath": found["pythonpath"],
        "source": source,
        "file": file,
        "python": python,
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
    folder: Path, has: Mapping[str, str], asked: Iterable[str], checkout: Path, *, source: str, python: str
) -> dict[str, str]:
    """Add what the image lacks, by the hashes of venv.lock. Each added wheel names the packages that it needs."""
    pins = {pin.name: pin for pin in lock.read(lock.venv(checkout))}
    ours = checkout / "build" / "wheels"
    name = f"beside-{python}"
    places = [ours / name, ours]
    if not os.access(ours.parent, os.W_OK):
        places.insert(0, folder.parent.parent / "wheels" / name)
    brought: dict[str, str] = {}
    while names := list(dict.fromkeys(_missing(asked, {**has, **brought}, pins))):
        for wheel in _wheels([pins[name] for name in names], python, places, source):
            with ZipFile(wheel) as archive:
                archive.extractall(folder)
        brought |= {name: pins[name].version for name in names}
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
                found=error.finding.found or error.finding.problem,
                fix=f"on a machine with a network, such as a login node: slurm/dray image adopt {shlex.quote(source)}\n"
                "or, if the image has no pip: make install && .venv/bin/dray image adopt FILE",
            ) from error
        wheels, _ = platforms.present(pins, places, python)
    return wheels


def _fetch(pins: Sequence[Pin], python: str, files: Path) -> None:
    """Fetch with the image's or the user's own pip and its configuration. It runs no package's code."""
    files.mkdir(parents=True, exist_ok=True)
    # A folder of its own first: another job may fetch the same wheels.
    with TemporaryDirectory(dir=files, prefix=".fetch-") as made:
        scratch = Path(made)
        requirements = scratch / "requirements.txt"
        requirements.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
        argv = platforms.download_argv(requirements=requirements, python=python, folder=scratch)
        process.run([*argv, "--quiet", "--retries", "1", "--timeout", "10"])
        for wheel in scratch.glob("*.whl"):
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
    stem = re.sub(r"[.](sif|tar|tgz|tar[.]gz)$", "", last.lower())
    return re.sub("[^a-z0-9_-]+", "-", stem).strip("-_")[:50] or "image"


def require_name(name: str) -> None:
    """Refuse what no adopted image can be called."""
    if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,62}", name) or name in VARIANTS:
        raise ConfigError(
            "not a name for an adopted image",
            wanted=f"lower-case letters, digits, _ and -, but not {', '.join(VARIANTS)}",
            found=name,
            fix="--name mine",
        )


def put(source: Path, folder: Path, folder_mode: int, say: Callable[[str], None]) -> None:
    """Link the image, or copy it if users other than its owner may change or replace it.

    No hard link: the owner may still change the file. `folder_mode` is the mode of the folder that holds it.
    """
    mode, others = source.stat().st_mode, ""
    if mode & 0o022:
        others = f"its mode is {mode & 0o7777:o}"
    elif folder_mode & 0o002 and not folder_mode & 0o1000:
        others = f"its folder has the mode {folder_mode:o}"
    (folder / SOURCE).symlink_to(source)
    if others:
        say(f"dray: it is copied, since others may write it: {others}")
        shutil.copyfile(source, folder / IMAGE)
        # The copy may have another group.
        (folder / IMAGE).chmod(0o644 if mode & 0o004 else 0o600)
    else:
        (folder / IMAGE).symlink_to(SOURCE)


def find(homes: Iterable[Path], name: str) -> Path | None:
    """The folder of the image that was adopted under this name, or from the file with this absolute path."""
    for home in homes:
        for described in sorted(home.glob(f"dray-*/{DESCRIBED}")):
            folder = described.parent
            link = folder / SOURCE
            if folder.name == f"dray-{name}" or (link.is_symlink() and os.readlink(link) == name):  # noqa: PTH115
                return folder
    return None


def _home(homes: Iterable[Path]) -> Path:
    """The folder for adopted images: the checkout's, or beside the runs if that cannot be written."""
    for home in homes:
        with suppress(OSError):
            home.mkdir(parents=True, exist_ok=True)
            if os.access(home, os.W_OK):
                return home
    raise ConfigError(
        "no folder can be written for an adopted image",
        where=" and ".join(map(str, homes)),
        fix="set DRAY_RUNS to a folder that you may write and that all nodes share",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def make(*, checkout: Path, runs: Path, source: Path, name: str, force: bool, file: str, folder_mode: int) -> Path:
    """Adopt a SIF in a job or at a login node; the image's own Python runs this. Returns the image in its folder.

    One rename gives the folder its name: another job may be making it too.
    """
    began = time.monotonic()
    homes = (checkout / "build", runs / ".adopted")
    earlier = find(homes, name or str(source))
    if earlier and not force:
        if not name:
            return earlier / IMAGE
        fix = f"give another one: --name {name}-2; or replace it: --force"
        raise ConfigError("there is an image of this name", where=earlier, fix=fix)
    if earlier:
        name = earlier.name.removeprefix("dray-")
    elif not name:
        name = named(source.name)
        if name in VARIANTS or find(homes, name):
            name += f"-{lock.digest(str(source))[:8]}"
    require_name(name)
    os.umask(0o022)  # what is not private in it, other users of the checkout may use
    folder = earlier or _home(homes) / f"dray-{name}"
    _say(f"dray: adopt {source}")
    with TemporaryDirectory(dir=folder.parent, prefix=".adopt-") as scratch:
        os.environ["TMPDIR"] = scratch  # pip's: the container's own is small
        new = Path(scratch) / "new"
        new.mkdir()
        put(source, new, folder_mode, _say)
        digest = sha256(new / IMAGE)
        _say(f"  read in {time.monotonic() - began:.0f} s: sha256:{digest}")
        look = (checkout / "src" / "dray" / "checks" / "list_packages.py").read_text(encoding="utf-8")
        found = json.loads(process.run([sys.executable, "-c", look]).out.splitlines()[-1])  # an image may greet
        brought = fill(
            new, found, name=name, source=str(source), file=file, sha256=digest, checkout=checkout, start=_start
        )
        _say("  " + ", ".join(f"{package} {version}" for package, version in versions(found).items()))
        if brought:
            _say(f"  added beside it: {', '.join(brought)}")
        try:
            with interrupts.held_back():
                if earlier:
                    earlier.rename(Path(scratch) / "old")
                new.rename(folder)
        except OSError as error:
            if find(homes, str(source)) != folder:  # else another job was quicker
                fix = "give another: slurm/dray image adopt FILE --name NAME"
                raise UnfitError("the adopted image does not get its name", where=folder, fix=fix) from error
    _say(f"dray: adopted in {time.monotonic() - began:.0f} s: adopted={name}")
    return folder / IMAGE


def main() -> None:
    """Print the adopted image. slurm/adopt.sh knows what the container does not show: owners, and the file's folder."""
    parser = argparse.ArgumentParser(prog="slurm/dray image adopt", usage="%(prog)s FILE [--name NAME] [--force]")
    for word in ("checkout", "runs", "source"):
        parser.add_argument(word, type=Path)
    parser.add_argument("file")
    parser.add_argument("folder_mode", type=lambda mode: int(mode, 8))
    parser.add_argument("--name", default="")
    parser.add_argument("--force", action="store_true")
    try:
        with interrupts.stoppable():
            print(make(**vars(parser.parse_args())))
    except KeyboardInterrupt as stopped:
        name = str(stopped) or "SIGINT"
        _say(f"dray: the adoption was stopped by {name}")
        sys.exit(128 + signal.Signals[name])
    except Exception as raised:
        error = failures.unexpected_error(raised, log=True)  # a file in /tmp would go with the container
        _say(f"dray: {error}")
        code = error.finding.code
        sys.exit(_DEFECT if code == exit_codes.FAILED else code)  # a Python that is too old for dray ends with 1
