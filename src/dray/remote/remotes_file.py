"""The remotes that the user has named, in a file of the user's own configuration."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from dray.config import dray_home
from dray.contract import files
from dray.contract.findings import ConfigError, listed

# No host can be an option of ssh, and none needs quoting in a shell.
_PLACE = re.compile(r"((?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*):(/[^/.].*)")


class Remote(NamedTuple):
    """A login node, and the folder there that dray uses."""

    name: str
    place: str
    """As `dray remote add` takes it."""
    host: str
    """As ssh takes it: `user@host`, or a Host of ~/.ssh/config."""
    path: str


def file() -> Path:
    """The file with the names."""
    return dray_home.configuration() / "remotes.toml"


def parse(name: str, place: str, where: Path | None = None) -> Remote:
    """Parse a remote as the user types it, or from the file `where`."""
    found = _PLACE.fullmatch(place)
    # A control character would end a line of a batch script.
    if not found or not place.isprintable():
        raise ConfigError(
            "this is not a folder of yours on another machine", where=where,
            wanted="USER@HOST:/FOLDER or HOST:/FOLDER, where HOST may be a Host of ~/.ssh/config, and FOLDER is a path "
            "such as /scratch/USER/dray",
            found=ascii(place),
        )  # fmt: skip
    return Remote(name, place, found[1], found[2].rstrip("/"))


def read() -> dict[str, Remote]:
    """All remotes by name."""
    path = file()
    if not (path.exists() or path.is_symlink()):
        return {}
    if trouble := files.open_to_others(path):
        raise ConfigError(
            "other users could change where your jobs go", where=path, wanted="a file that you alone may write",
            found=trouble, fix=f"look at it, then chmod 600 {path}",
        )  # fmt: skip
    try:
        table = tomllib.loads(files.read(path).decode())
    except ValueError as wrong:
        raise ConfigError("the file of remotes is damaged", where=path, found=wrong, fix="edit or remove it") from wrong
    return {name: parse(name, str(place), path) for name, place in table.items()}


def write(remotes: dict[str, Remote]) -> None:
    """Replace the file, which only the user may read and write."""
    path = file()
    # JSON's strings are TOML's.
    lines = [f"{json.dumps(name)} = {json.dumps(one.place, ensure_ascii=False)}\n" for name, one in remotes.items()]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write_atomic(path, "".join(lines), mode=0o600)


def find(name: str) -> Remote:
    """The remote with this name."""
    found = read().get(name)
    if found is None:
        raise ConfigError(
            "there is no such remote", where=file(), wanted=listed(read()), found=ascii(name),
            fix="dray remote add NAME USER@HOST:/FOLDER",
        )  # fmt: skip
    return found
