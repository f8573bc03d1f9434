"""The remotes that the user has named, in a file of the user's own configuration."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

from dray.config import dray_home
from dray.contract import files
from dray.contract.findings import ConfigError, listed, nearest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# None of these can be an option of ssh, and none needs quoting in a shell.
_HOST = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*"
_PLACE = re.compile(rf"({_HOST}):(/.*)", re.DOTALL)
_URL = re.compile(rf"[a-z]+://({_HOST})(/[!-~]*)")
_WANTED = "USER@HOST:/FOLDER or HOST:/FOLDER, where HOST may be a Host of ~/.ssh/config"


class Remote(NamedTuple):
    """A login node, and the folder there that dray uses."""

    name: str
    host: str
    """As ssh takes it: `user@host`, or a Host of ~/.ssh/config."""
    path: str

    @property
    def place(self) -> str:
        """As `dray remote add` takes it."""
        return f"{self.host}:{self.path}"


def file() -> Path:
    """The file with the names."""
    return dray_home.configuration() / "remotes.toml"


def parse(name: str, place: str) -> Remote:
    """Parse a remote as the user types it, or from the file."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a remote cannot have this name",
            wanted="letters, digits, `.`, `_` and `-`, at most 63, the first a letter or a digit",
            found=ascii(name),
        )
    found = None if "://" in place else _PLACE.fullmatch(place)
    if not found:
        url = _URL.fullmatch(place)
        raise ConfigError(
            "this is not a folder on another machine", wanted=_WANTED, found=ascii(place),
            fix=f"dray remote add {name} {url[1]}:{shlex.quote(url[2])}" if url else "",
        )  # fmt: skip
    path = os.path.normpath(found[2]).replace("//", "/")
    if path == "/" or ".." in found[2].split("/"):
        raise ConfigError(
            "dray needs its own folder on the remote",
            wanted="a path such as /scratch/USER/dray, without `..`",
            found=ascii(place),
        )
    if not path.isprintable():
        raise ConfigError(
            "a path with a control character would end a line of a batch script",
            wanted="printable characters",
            found=ascii(place),
        )
    return Remote(name, found[1], path)


def read() -> dict[str, Remote]:
    """All remotes by name."""
    path = file()
    try:
        if trouble := files.open_to_others(path):
            raise ConfigError(
                "other users could change where your jobs go",
                where=path,
                wanted="a file that you alone may write",
                found=trouble,
                fix=f"look at it, then chmod 600 {path}",
            )
        table = tomllib.loads(files.read(path).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as wrong:
        raise ConfigError(
            "the file of remotes cannot be read", where=path, found=wrong, fix="edit or remove it"
        ) from wrong
    found = {}
    for name, entry in table.items():
        keys = {"host", "path"}
        if not isinstance(entry, dict) or {*entry} != keys or not all(isinstance(entry[key], str) for key in keys):
            raise ConfigError(
                "a remote in the file is malformed", where=f"{path}, [{name}]", wanted="the keys host and path"
            )
        found[name] = parse(name, f"{entry['host']}:{entry['path']}")
    return found


def write(remotes: dict[str, Remote]) -> None:
    """Replace the file, which only the user may read and write."""
    path = file()
    text = "".join(
        f"[{json.dumps(name)}]\nhost = {_quoted(one.host)}\npath = {_quoted(one.path)}\n\n"
        for name, one in remotes.items()
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_atomic(path, text, mode=0o600)
    except OSError as error:
        raise ConfigError("the file of remotes cannot be written", where=path, found=error.strerror or error) from error


def find(name: str) -> Remote:
    """The remote with this name."""
    remotes = read()
    if name not in remotes:
        near = nearest(name, remotes)
        raise ConfigError(
            "there is no such remote",
            where=file(),
            wanted=f"one of {listed(sorted(remotes))}" if remotes else "a remote that you have added",
            found=ascii(name),
            fix=f"did you mean {near}?" if near else "dray remote add NAME USER@HOST:/FOLDER",
        )
    return remotes[name]


def _quoted(text: str) -> str:
    """JSON's strings are TOML's: `parse` lets no DEL pass, which alone differs."""
    return json.dumps(text, ensure_ascii=False)
