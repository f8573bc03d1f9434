"""Locks: the hash of every file that an image may hold, resolved from its requirements."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.config.image import Image
from dray.contract.findings import ConfigError, DrayError, UnfitError

# It has no wheels; the image's build makes one, where its operators can be compiled.
SOURCE_ONLY = "deepspeed"
_MAIN = "requirements.in"
_PROJECT = "../../pyproject.toml"
PLATFORM = "x86_64-manylinux_2_28"
# What only torch's builds for CUDA need.
_FOR_CUDA = re.compile(r"nvidia-.*|cuda-.*|triton")
# With a folder of wheels, whose build of torch comes out would be that folder's choice. And uv, unlike pip, knows
# nothing of this machine's own certificates unless it is told; older ones call it native TLS.
UV_ENVIRONMENT = {"UV_FIND_LINKS": "", "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
_HASHED = "--require-hashes --constraint containers/venv.lock"
_VERSION = re.compile(r"[\w.-]+==[\w.+!]+\n")
_HEAD = re.compile(r"# dray image lock \S+, (\d{4}-\d\d-\d\d)\n# from (.*)\n# lines ([0-9a-f]{16})\n")


@dataclass(frozen=True)
class Pin:
    """A package in one version, with the hash of each file that it may be."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        return " \\\n    ".join((f"{self.name}=={self.version}", *(f"--hash=sha256:{one}" for one in self.hashes)))


def read(lock: Path) -> list[Pin]:
    """What a lock pins, in its order."""
    pins = []
    for line in _text(lock).replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            first, *rest = line.split()
            name, _, version = first.partition("==")
            pins.append(Pin(name, version, tuple(word.removeprefix("--hash=sha256:") for word in rest)))
    return pins


def epoch(lock: Path) -> int:
    """The lock's date in seconds since 1970: the time of all files in the image."""
    return int(datetime.fromisoformat(about(lock)[0]).replace(tzinfo=UTC).timestamp())


def require_fresh(checkout: Path, image: Image) -> None:
    """Refuse locks of an image that are out of date, or were changed by hand."""
    for source in _sources(checkout, image):
        require_made_from(source.with_suffix(".lock"), _origins(source, image))


def require_made_from(lock: Path, now: dict[str, str]) -> None:
    """Refuse a lock that was made from other origins than `now`, or was changed by hand."""
    locked = about(lock)[1]
    if _edited(_text(lock)):
        raise _stale(lock, problem="the lock was changed after `dray image lock` wrote it")
    changed = [name for name in {**now, **locked} if locked.get(name) != now.get(name)]
    if changed:
        raise _stale(lock, found=f"changed since then: {', '.join(changed)}")


def update(checkout: Path, image: Image, *, upgrade: bool = False) -> list[str]:
    """Resolve again and replace all locks of the variant, or none. Returns what changed."""
    found: list[str] = []
    (checkout / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=checkout / "build", prefix=".lock-") as made:
        copy = Path(made)
        shutil.copytree(checkout / "containers", copy / "containers")
        shutil.copy2(checkout / "pyproject.toml", copy)
        for source in _sources(copy, image):
            found += _lock(source, image, upgrade=upgrade)
        for source in _sources(checkout, image):
            lock = source.with_suffix(".lock")
            (copy / lock.relative_to(checkout)).replace(lock)
    return found


def _sources(checkout: Path, image: Image) -> list[Path]:
    """The requirements of the image, then of its build's tools, which must not change the first."""
    folder = checkout / "containers" / image.variant
    return [folder / _MAIN, *folder.glob("build.in")]


def _lock(source: Path, image: Image, *, upgrade: bool) -> list[str]:
    lock = source.with_suffix(".lock")
    before = read(lock) if lock.exists() else []
    main = source.name == _MAIN
    date = _HEAD.match(_text(lock)) if before else None
    # uv keeps to the versions in the output file that is there, and to their hashes, even to one that no file has.
    if before and _edited(_text(lock)):
        kept = (f"{pin.name}=={pin.version}\n" for pin in before)
        lock.write_text("".join(line for line in kept if _VERSION.fullmatch(line)))
    argv = [
        *(*compiler(), "--python-version", image.python, "--python-platform", PLATFORM),
        *("--only-binary", ":all:", "--no-binary", SOURCE_ONLY, *(["--upgrade"] if upgrade else [])),
        *("--output-file", lock.name, source.name, *([_PROJECT] if main else [])),
    ]
    done = process.run(argv, cwd=source.parent, env=UV_ENVIRONMENT, check=False)
    if done.code != 0:
        raise unsolved(f"containers/{image.variant}/{source.name}", done.err)
    pins = _with_vendors(read(lock), source, image) if main else read(lock)
    day = date[1] if date and pins == before else ""
    lines = "".join(f"{pin}\n" for pin in pins)
    lock.write_text(head(image.variant, _origins(source, image), lines, day=day) + lines)
    return list(changes(before, pins))


def head(name: str, origins: dict[str, str], lines: str, *, day: str = "") -> str:
    """A lock's first lines: when and from what it was made, and a digest of the rest."""
    made_from = ", ".join(f"{origin} {found}" for origin, found in origins.items())
    day = day or datetime.now(UTC).date().isoformat()
    return f"# dray image lock {name}, {day}\n# from {made_from}\n# lines {digest(lines)}\n"


def _with_vendors(pins: Iterable[Pin], source: Path, image: Image) -> list[Pin]:
    """Replace the registry's wheels by the vendors'; a vendor's torch drops libraries that only the other one needs."""
    kept = {pin.name: pin for pin in pins}
    if any(vendor.name == "torch" for vendor in image.vendor):
        asked = {re.split(r"[^\w.-]", line)[0] for _, lines in _asked(source) for line in lines}
        kept = {name: pin for name, pin in kept.items() if name in asked or not _FOR_CUDA.fullmatch(name)}
    for vendor in image.vendor:
        # On a CPU any build of torch serves: `make demo` takes the one that is installed.
        version = vendor.version.partition("+")[0] if image.accelerator == "cpu" else vendor.version
        kept[vendor.name] = Pin(vendor.name, version, tuple(vendor.sha256))
    return [kept[name] for name in sorted(kept)]


def changes(before: Iterable[Pin], now: Iterable[Pin]) -> Iterator[str]:
    """What changed, a line for each package."""
    old, new = ({pin.name: pin for pin in pins} for pins in (before, now))
    for name in sorted(old.keys() | new.keys()):
        was, is_ = old.get(name), new.get(name)
        if was and is_ and was.version == is_.version and was != is_:
            yield f"{name} {is_.version}: other hashes"
        elif was != is_:
            yield f"{name} {was.version if was else 'none'} -> {is_.version if is_ else 'none'}"


def _origins(source: Path, image: Image) -> dict[str, str]:
    """The origins of a lock, each with a digest of the lines that count."""
    texts = {os.path.relpath(path, source.parent): "\n".join(lines) for path, lines in _asked(source)}
    counts = image.model_dump(include={"python", "vendor"}, exclude={"vendor": {"__all__": {"mb"}}})
    texts["image.toml"] = json.dumps(counts, sort_keys=True)
    return {name: digest(text) for name, text in texts.items()}


def _asked(source: Path) -> Iterator[tuple[Path, list[str]]]:
    """A file's lines without comments, then those of files that it names, and dray's own dependencies."""
    lines = [line for raw in _text(source).splitlines() if (line := re.sub(r"(^|\s+)#.*", "", raw).strip())]
    yield source, lines
    for line in lines:
        option, _, name = line.partition(" ")
        if option in {"-r", "-c"}:
            yield from _asked(source.parent / name.strip())
    if source.name == _MAIN:
        project = source.parent / _PROJECT
        yield project, tomllib.loads(_text(project))["project"]["dependencies"]


def about(lock: Path) -> tuple[str, dict[str, str]]:
    """When and from what a lock was made."""
    if not lock.exists():
        raise _stale(lock, found="no such file")
    head = _HEAD.match(_text(lock))
    if not head:
        raise _stale(lock, found="its first lines, with the date and the origins, are missing or damaged")
    origins = (origin.rpartition(" ") for origin in head[2].split(", "))
    return head[1], {name: digest for name, _, digest in origins}


def _edited(text: str) -> bool:
    """Whether the lines of a lock differ from the digest in its head."""
    head = _HEAD.match(text)
    return head is None or head[3] != digest(text[head.end() :])


def digest(text: str) -> str:
    """A short digest, enough to see that a text has changed."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as missing:
        raise ConfigError("a file that the lock is made from does not exist", where=path) from missing


def compiler() -> list[str]:
    """The command that resolves requirements to versions and hashes."""
    return [uv(), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]


def uv() -> str:
    """The path of uv."""
    beside = Path(sys.executable).with_name("uv")
    uv = process.which("uv") or (str(beside) if beside.exists() else None)
    if not uv:
        python = shlex.quote(sys.executable)
        raise UnfitError("locking needs uv", where=sys.executable, fix=f"{python} -m pip install {_HASHED} uv")
    return uv


def _stale(
    lock: Path, *, problem: str = "the lock does not match its requirements", found: str | None = None
) -> ConfigError:
    if lock.name.startswith("dray-"):
        fix = "make it again: dray image layer VARIANT --pip PACKAGE"
    else:
        fix = f"dray image lock {_named(lock)}"
    return ConfigError(problem, where=lock, found=found, fix=fix)


def _named(lock: Path) -> str:
    """The lock's name for `dray image lock`: the variant's folder, or the file itself."""
    return lock.stem if lock.parent.name == "containers" else lock.absolute().parent.name


def unsolved(where: str, text: str) -> DrayError:
    """The error if uv finds no set of packages, with what to do."""
    if "Failed to fetch" in text:
        fix = "try again; or set UV_DEFAULT_INDEX to a mirror: uv does not read pip's configuration"
        return DrayError("uv cannot reach the package index", where=where, found=text.strip(), fix=fix)
    fix = "change the requirement; a package without wheels needs its own step in the build"
    return ConfigError("no set of packages fits these requirements", where=where, found=text.strip(), fix=fix)
