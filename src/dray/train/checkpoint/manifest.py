"""manifest.json of a checkpoint or a final model: which files belong to it, with sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

from dray.contract.files import open_regular, open_to_others
from dray.contract.findings import ConfigError, DrayError

NAME = "manifest.json"
BLOCK = 1 << 24
LIMIT = 1 << 28  # bytes: a name and three numbers for each tensor and rank
_INSIDE = re.compile(r"(\w[\w.-]*/)*\.?\w[\w.-]*", re.ASCII)  # a path that leads nowhere else
SEAL = "sha256"
_PROSE = "*.md"  # of a final model; a user may write in its card


@contextmanager
def new(path: Path) -> Iterator[BufferedWriter]:
    """A new file, which is on the disk at the end. No group may write it, whatever the umask."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def written(
    path: Path, *parts: bytes | memoryview, moved: Callable[[int], None] = lambda _size: None
) -> dict[str, Any]:
    """Write a new file; its size and checksum.

    `moved` hears of each block's bytes.
    """
    checksum = hashlib.sha256()
    with new(path) as file:
        for part in parts:
            for at in range(0, len(part), BLOCK):
                file.write(block := part[at : at + BLOCK])
                checksum.update(block)  # not in a thread of its own: on two cores that took twice the CPU time
                moved(len(block))
    return {"bytes": sum(map(len, parts)), "sha256": checksum.hexdigest()}


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """The last file of a folder."""
    written(folder / NAME, json.dumps(manifest).encode())
    sync(folder)


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add a checksum of the manifest itself, so that changed bytes are noticed."""
    return {**manifest, SEAL: hashlib.sha256(json.dumps(manifest).encode()).hexdigest()}


def is_sealed(manifest: dict[str, Any]) -> bool:
    """Whether the manifest's own checksum is right, whatever the JSON's layout."""
    with suppress(RecursionError):  # of JSON that somebody has crafted
        return sealed({name: value for name, value in manifest.items() if name != SEAL}) == manifest
    return False


def natural(value: object) -> bool:
    """Whether this is a non-negative integer; JSON's true is not."""
    return type(value) is int and 0 <= value < 1 << 62


def sync(folder: Path) -> None:
    """Sync the folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def parse(text: str | bytes) -> Any:  # noqa: ANN401  any JSON value
    """Parse JSON; refuse an object with the same name twice."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def read(folder: Path) -> dict[str, Any]:
    """The manifest, or `trouble` with the reason why it is invalid."""
    try:
        with open_regular(folder / NAME) as file:
            found = parse(file.read())
    except (OSError, ValueError, RecursionError) as error:
        return {"trouble": f"its manifest cannot be read ({error})"}
    match found:
        case {"version": int(), "files": dict(files)} if all(_named(name, one) for name, one in files.items()):
            return dict(found)
    return {"trouble": "its manifest has no valid list of files"}


def _named(name: str, file: Any) -> bool:  # noqa: ANN401  any JSON value
    match file:
        case {"bytes": size, "sha256": str()}:
            return bool(_INSIDE.fullmatch(name)) and natural(size)
    return False


def wrong(folder: Path, files: dict[str, Any], some: slice = slice(None)) -> dict[str, str]:
    """The files that differ from the manifest, each with the reason."""
    found = {}
    for name in sorted(files)[some]:
        try:
            if described(folder / name) != {key: files[name][key] for key in ("bytes", "sha256")}:
                found[name] = f"{name} is not what was written"
        except OSError as error:
            found[name] = f"{name}: {error.strerror}"
    return found


def cut_off(folder: Path) -> str:
    """Which file is shorter than what was written, by its size; empty if none."""
    found = read(folder)
    if "trouble" in found:
        return str(found["trouble"])
    for name, one in found["files"].items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != one["bytes"]:
            return f"{name} has {size} bytes, but {one['bytes']} were written"
    return ""


def described(path: Path) -> dict[str, Any]:
    """Size and checksum of a file that is there."""
    with open_regular(path, link=False) as file:
        return of_file(file)


def of_file(file: BufferedReader) -> dict[str, Any]:
    """The same of an open file."""
    size = os.fstat(file.fileno()).st_size
    return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def require_own(folder: Path) -> None:
    """Refuse a folder, or files in it, that another user owns or may write to."""
    seen = [(str(folder), open_to_others(folder, folder=True))]
    for one in [] if seen[0][1] else sorted(folder.iterdir()):
        with suppress(FileNotFoundError):  # another run, which will be refused, looks who has the folder
            if not one.is_symlink() and one.is_file():
                seen.append((str(one), open_to_others(one)))
    for path, found in seen:
        if found:
            raise ConfigError(
                "the checkpoint is open to other users",
                where=path,
                wanted=f"owned by user {os.geteuid()}, and writable by no other user",
                found=found,
                fix=f"if it is yours and you know who wrote it: chmod -R go-w '{folder}'; else set another "
                "checkpoint.folder",
            )


def seal_model(folder: Path) -> None:
    """Write the manifest of a model that `from_pretrained` loads; its card may be written later."""
    (folder / NAME).unlink(missing_ok=True)
    write(folder, {"version": 1, "files": {name: described(folder / name) for name in _names(folder)}})


def _names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not (path.is_dir() or path.match(_PROSE)))
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def check_model(folder: Path, *, weights: bool = True, required: bool = True) -> None:
    """Refuse a final model that differs from what its run wrote. Other models have no manifest and pass."""
    if not required and not (folder / NAME).exists():
        return
    manifest = read(folder)
    files = manifest.get("files", {})
    troubles = [manifest["trouble"]] if "trouble" in manifest else []
    looked = {name: one for name, one in files.items() if weights or not name.endswith(".safetensors")}
    troubles += wrong(folder, looked).values()
    if not troubles:
        troubles += [f"{name} was added" for name in _names(folder) if name not in {NAME, *files}]
    if troubles:
        raise DrayError(
            "the model's files differ from those that its run wrote",
            where=folder,
            wanted=f"the files that {NAME} lists",
            found="; ".join(troubles[:3]),
            fix="export it again: dray model export RUN; if you changed it yourself, copy it to a folder without "
            f"{NAME}, and set model.name to that folder",
            code=ConfigError.exit_code,
        )
