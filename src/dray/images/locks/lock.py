"""A lock: the hash of every file that an image, a layer or .venv may hold, and what they were resolved from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.contract import files
from dray.contract.findings import ConfigError

if TYPE_CHECKING:  # an adopted image may lack pydantic
    from dray.config.image_definition import Image

# It has no wheels; the image's build makes one, where its operators can be compiled.
SOURCE_ONLY = "deepspeed"
MAIN = "requirements.lock"
_PROJECT = "../../pyproject.toml"
_HEAD = re.compile(r"# dray image lock \S+, (\d{4}-\d\d-\d\d)\n# from (.*)\n# lines ([0-9a-f]{16})\n")


@dataclass(frozen=True)
class Pin:
    """A package in one version, with the hash of each file that it may be."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        hashes = (f"--hash=sha256:{digest}" for digest in self.hashes)
        return " \\\n    ".join((f"{self.name}=={self.version}", *hashes))


def of(checkout: Path, image: Image | None) -> list[Path]:
    """The locks of an image: of what stays in it, and of its build's tools if it needs any. Or else of .venv."""
    if image is None:
        return [venv(checkout)]
    main = checkout / "containers" / image.variant / MAIN
    return [main, *(path.with_suffix(".lock") for path in main.parent.glob("build.in"))]


def venv(checkout: Path) -> Path:
    """The lock of what `make` installs into .venv, and of what builds dray's own wheel."""
    return checkout / "containers" / "venv.lock"


def read(lock: Path) -> list[Pin]:
    """What a lock pins, in its order."""
    return parse(_text(lock))


def parse(text: str) -> list[Pin]:
    """What the lines of a lock pin."""
    pins = []
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.split()[0].partition("==")
            pins.append(Pin(name, version, tuple(re.findall(r"--hash=sha256:(\S+)", line))))
    return pins


def write(lock: Path, origins: Mapping[str, str], lines: str) -> list[str]:
    """Write the lock, with its old date if no line differs. Returns a line for each package that has changed."""
    before = _text(lock) if lock.exists() else ""
    head = _HEAD.match(before)
    unchanged = head and before[head.end() :] == lines
    day = head[1] if head and unchanged else datetime.now(UTC).date().isoformat()
    made_from = ", ".join(f"{origin} {value}" for origin, value in origins.items())
    title = f"# dray image lock {name(lock)}, {day}\n# from {made_from}\n# lines {digest(lines)}\n"
    files.write_atomic(lock, title + lines)
    return changes(parse(before), parse(lines))


def epoch(lock: Path) -> int:
    """The lock's date in seconds since 1970: the time of all files in the image."""
    return int(datetime.fromisoformat(about(lock)[0]).replace(tzinfo=UTC).timestamp())


def about(lock: Path) -> tuple[str, dict[str, str]]:
    """When and from what a lock was made."""
    if not lock.exists():
        raise _stale(lock, found="no such file")
    head = _HEAD.match(_text(lock))
    if not head:
        raise _stale(lock, found="its first lines, with the date and the origins, are missing or damaged")
    origins = (origin.rpartition(" ") for origin in head[2].split(", "))
    return head[1], {name: digest for name, _, digest in origins}


def require_fresh(checkout: Path, image: Image | None) -> None:
    """Refuse locks of an image, or else of .venv, that are out of date or were changed by hand."""
    for lock in of(checkout, image):
        require_made_from(lock, origins(lock, image))


def require_made_from(lock: Path, now: Mapping[str, str]) -> None:
    """Refuse a lock that was made from other origins than `now`, or was changed by hand."""
    locked = about(lock)[1]
    if is_edited(_text(lock)):
        raise _stale(lock, problem="the lock was changed after `dray image lock` wrote it")
    changed = [name for name in {**now, **locked} if locked.get(name) != now.get(name)]
    if changed:
        raise _stale(lock, found=f"changed since then: {', '.join(changed)}")


def origins(lock: Path, image: Image | None) -> dict[str, str]:
    """What the lock of an image, or else of .venv, is made from, each with a digest of the lines that count."""
    if image is None:
        project, cpu = _project(lock.parents[1]), read(lock.parent / "cpu" / MAIN)
        counts = [project["build-system"], project["project"]["dependencies"]]
        counts.append(project["project"]["optional-dependencies"])
        texts = {"pyproject.toml": json.dumps(counts), f"cpu/{MAIN}": str(cpu)}
    else:
        texts = {os.path.relpath(path, lock.parent): "\n".join(lines) for path, lines in requirements(lock)}
        texts["image.toml"] = json.dumps(image.model_dump(include={"python", "vendor"}), sort_keys=True)
    return {name: digest(text) for name, text in texts.items()}


def requirements(lock: Path) -> Iterator[tuple[Path, list[str]]]:
    """The files that an image's lock is made from, each with its lines without comments; pyproject.toml is the last."""
    yield from _lines(lock.with_suffix(".in"))
    if lock.name == MAIN:
        yield lock.parent / _PROJECT, _project(lock.parents[2])["project"]["dependencies"]


def _lines(file: Path) -> Iterator[tuple[Path, list[str]]]:
    lines = [line for raw in _text(file).splitlines() if (line := re.sub(r"(^|\s+)#.*", "", raw).strip())]
    yield file, lines
    for line in lines:
        option, _, name = line.partition(" ")
        if option in {"-r", "-c"}:
            yield from _lines(file.parent / name.strip())


def is_edited(text: str) -> bool:
    """Whether the lines of a lock differ from the digest in its head."""
    head = _HEAD.match(text)
    return head is None or head[3] != digest(text[head.end() :])


def digest(text: str) -> str:
    """A short digest, enough to see that a text has changed, and for the name of a folder."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changes(old: Iterable[Pin], new: Iterable[Pin]) -> list[str]:
    """What changed, a line for each package."""
    before, now = ({pin.name: pin for pin in pins} for pins in (old, new))
    none = Pin("", "none", ())
    return [
        f"{name} {before.get(name, none).version} -> {now.get(name, none).version}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _project(checkout: Path) -> dict[str, Any]:
    return tomllib.loads(_text(checkout / "pyproject.toml"))


def _text(path: Path) -> str:
    return files.text(path, path.name)


def _stale(
    lock: Path, *, problem: str = "the lock does not match its requirements", found: str | None = None
) -> ConfigError:
    if lock.name.startswith("dray-"):
        fix = "make it again: dray image layer VARIANT --pip PACKAGE"
    else:
        fix = f"dray image lock {name(lock)}"
    return ConfigError(problem, where=lock, found=found, fix=fix)


def name(lock: Path) -> str:
    """The lock's name for `dray image lock`: the variant's folder, or the file itself."""
    return lock.absolute().parent.name if lock.name in (MAIN, "build.lock") else lock.stem
