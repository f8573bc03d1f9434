"""What a run needs at a remote, copied by rsync: the image, dray's scripts, and the folder of its recipe."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dray.config import dray_home
from dray.contract.findings import ConfigError
from dray.remote.ssh import Connection

BYTES = 64 << 20
"""The most bytes that dray copies with a recipe: a command may have been started in the home folder."""
# What a job and a login node read of a checkout; the rest is in the image.
_SCRIPTS = ("slurm", "recipes", "containers/steps")
_LEFT = {"__pycache__", "runs", "build", "node_modules"}


class Copied(NamedTuple):
    """The scripts, image and code that a verb uses at the remote, by their names there; empty: those copied last."""

    dray: str = ""
    image: str = ""
    code: str = ""


def copy_image(connection: Connection, image: Path, say: Callable[[str], None]) -> Copied:
    """Copy the image and dray's scripts, if the remote does not have them. Later verbs use them."""
    from dray.images.sif import verify  # noqa: PLC0415  it reads TOML and records, for which no list of runs waits

    digest = verify.digest(image).removeprefix("sha256:")
    sif = f"images/{digest}.sif"
    if connection.ask("image", sif).strip() != "here":
        say(f"copying {image.name} to {connection.remote.place}")
        connection.rsync(str(image.absolute()), f"{sif}.part", "--partial")
        connection.ask("arrived", sif)
    root = dray_home.root()
    scripts = [f"{top}/{name}" for top in _SCRIPTS for name in files_of(root / top)]
    content = b"".join(f"\0{name}\0".encode() + (root / name).read_bytes() for name in scripts)
    dray = f"dray/{hashlib.sha256(content).hexdigest()}"
    copy_files(connection, root, scripts, dray)
    connection.ask("keep", dray, sif)
    return Copied(dray, sif)


def copy_files(connection: Connection, folder: Path, names: Sequence[str], item: str) -> None:
    """Copy these files of a folder. What a job has written beside them stays."""
    with tempfile.NamedTemporaryFile() as listed:
        listed.write(os.fsencode("\0".join(names)))
        listed.flush()
        # By content, and with the time of now: sites remove files from scratch that look old.
        connection.rsync(f"{folder}/", f"{item}/", "--links", "--checksum", "--from0", f"--files-from={listed.name}")


def files_of(top: Path) -> list[str]:
    """The files of a folder and its links, which must stay in it; without hidden ones, and what programs and runs
    leave."""
    found = list[str]()
    total = 0
    for folder, folders, files in os.walk(top, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in [*links, *sorted(name for name in files if not name.startswith("."))]:
            path = Path(folder, name)
            if path.is_symlink() and not _stays(path, top):
                raise ConfigError(
                    "a link points outside the folder that dray copies to a remote, or has an absolute path",
                    where=path, wanted=f"a relative link to something in {top}", found=path.readlink(),
                    fix="replace it by a copy, or remove it and give an absolute path on the remote",
                )  # fmt: skip
            found.append(str(path.relative_to(top)))
            total += path.lstat().st_size
            if total > BYTES:
                raise ConfigError(
                    "the recipe's folder is too large to copy", where=top, wanted="at most 64 MiB",
                    fix="put the recipe and its code in a folder of their own; copy data to the remote once, and give "
                    "its absolute path there",
                )  # fmt: skip
    return found


def _stays(link: Path, top: Path) -> bool:
    return not link.readlink().is_absolute() and link.resolve().is_relative_to(top.resolve())


def _unreadable(error: OSError) -> None:
    raise error
