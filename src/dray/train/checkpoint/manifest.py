"""manifest.json of a checkpoint or a final model: which files belong to it, with sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any

from dray.contract.files import open_regular, open_to_others
from dray.contract.findings import ConfigError, DrayError

NAME = "manifest.json"
BLOCK = 1 << 24
VERSION = 3
"""The version of a checkpoint's manifest and files."""
_SEAL = "sha256"
_INSIDE = re.compile(r"(\w[\w.+ -]*/)*\.?\w[\w.+ -]*")  # a path that stays inside the folder
_PROSE = "*.md"  # not sealed: a user may edit a final model's card


@contextmanager
def new_file(path: Path) -> Iterator[BufferedWriter]:
    """Yield a new file that is synced to the disk at the end. No group may write it, whatever the umask."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(
    path: Path, *parts: bytes | memoryview, moved: Callable[[int], None] = lambda _size: None
) -> dict[str, Any]:
    """Write a new file; return its size and checksum. `moved` is called with the size of each block."""
    checksum = hashlib.sha256()
    with new_file(path) as file:
        for part in parts:
            for at in range(0, len(part), BLOCK):
                file.write(block := part[at : at + BLOCK])
                checksum.update(block)  # in this thread: another one took twice the CPU time on two cores
                moved(len(block))
    return {"bytes": sum(map(len, parts)), "sha256": checksum.hexdigest()}


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, the last file of a folder, with a checksum of itself."""
    write_file(folder / NAME, json.dumps({**manifest, _SEAL: _checksum(manifest)}).encode())
    sync(folder)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def sync(folder: Path) -> None:
    """Sync the folder itself, so that its new names are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:  # a disk that fails for hours would use up all handles
        os.close(handle)


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest, or a dict with `trouble`, the reason why it is invalid."""
    try:
        with open_regular(folder / NAME) as file:
            manifest = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        return {"trouble": f"its manifest cannot be read ({error})"}
    seal = manifest.pop(_SEAL, "") if isinstance(manifest, dict) else ""
    if seal == _checksum(manifest) and all(map(_INSIDE.fullmatch, manifest["files"])):
        return dict(manifest)
    return {"trouble": "its manifest is not what was written"}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the manifest, as `read` does; refuse another user's checkpoint, and one of another version."""
    require_own(path)
    manifest = read(path)
    if "trouble" not in manifest and manifest.get("version") != VERSION:
        raise ConfigError(
            "the checkpoint was written by another version of dray",
            where=path / NAME,
            wanted=f"checkpoint version {VERSION}",
            found=f"checkpoint version {manifest.get('version')}, written by dray {manifest.get('dray')}",
            fix="resume with an image of that version; or start from its model: model.name=RUN/checkpoints/final, and "
            "another checkpoint.folder",
        )
    return manifest


def damage(folder: Path, manifest: dict[str, Any], share: slice = slice(None)) -> list[str]:
    """Return what differs from the manifest, of this share of the files; an invalid manifest counts as one file."""
    if "trouble" in manifest:
        return [manifest["trouble"]][share]
    reasons = []
    for name in sorted(manifest["files"])[share]:
        try:
            if describe(folder / name) != manifest["files"][name]:
                reasons.append(f"{name} is not what was written")
        except OSError as error:
            reasons.append(f"{name}: {error.strerror}")
    return reasons


def describe(path: Path) -> dict[str, Any]:
    """Return the size and the checksum of a file."""
    with open_regular(path, link=False) as file:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def require_own(folder: Path) -> None:
    """Refuse a folder that another user owns or may write, and one with such files."""
    reasons = [(folder, open_to_others(folder, folder=True))]
    for path in [] if reasons[0][1] else sorted(folder.iterdir()):
        with suppress(FileNotFoundError):  # another run may delete its lease at this moment
            if not path.is_symlink() and path.is_file():
                reasons.append((path, open_to_others(path)))
    for path, reason in reasons:
        if reason:
            raise ConfigError(
                "the checkpoint is open to other users",
                where=path,
                wanted=f"owned by user {os.geteuid()}, and writable by no other user",
                found=reason,
                fix=f"if only you have written it: chmod -R go-w '{folder}'; else set another checkpoint.folder",
            )


def seal_model(folder: Path) -> None:
    """Write the manifest of a final model; its card may be written later."""
    (folder / NAME).unlink(missing_ok=True)
    write(folder, {"files": {name: describe(folder / name) for name in _names(folder)}})


def _names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not (path.is_dir() or path.match(_PROSE)))
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def check_model(folder: Path, *, weights: bool = True, required: bool = True) -> None:
    """Refuse a final model that differs from what its run wrote. Other models have no manifest and pass."""
    if not required and not (folder / NAME).exists():
        return
    manifest = read(folder)
    files = manifest.get("files", {})
    checked = {name: file for name, file in files.items() if weights or not name.endswith(".safetensors")}
    reasons = damage(folder, {**manifest, "files": checked})
    reasons = reasons or [f"{name} was added" for name in _names(folder) if name not in {NAME, *files}]
    if reasons:
        raise DrayError(
            "the model's files differ from those that its run wrote",
            where=folder,
            wanted=f"the files that {NAME} lists",
            found="; ".join(reasons[:3]),
            fix="export it again: dray model export RUN; if you changed it yourself, copy it to a folder without "
            f"{NAME}, and set model.name to that folder",
            code=ConfigError.exit_code,
        )
