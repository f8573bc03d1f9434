"""`dray cache`: what runs keep on this machine beside their folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dray.contract import node, scratch
from dray.contract.files import open_to_others
from dray.contract.findings import ConfigError

app = typer.Typer(no_args_is_help=True, help="List and remove the tokens that runs keep on this machine.")

Folder = Annotated[
    Path | None, typer.Argument(metavar="[FOLDER]", help=f"A data.cache_dir; else {node.TOKENS}UID, the default.")
]
_TOKENS = re.compile(r"[0-9a-f]{24}(\.part-[0-9a-f]{16})?")
_DAY = 86400
_WRITES = 3600  # seconds after which a run that makes tokens has written again


class Entry(NamedTuple):
    """The tokens of a dataset."""

    folder: Path
    dataset: str
    size: int
    unused: float
    """Days since a run read or wrote them."""

    def __str__(self) -> str:
        return f"{self.size / 1e6:10.1f} MB  {self.unused:5.1f} days  {self.folder}  {self.dataset}"


@app.command("list")
def show(
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for scripts.")] = False,
) -> None:
    """Print each dataset's tokens: size, days since a run used them, folder, dataset.

    dray cache list --json
    """
    entries = sorted(_entries(_checked(folder)), key=lambda entry: entry.unused)
    if as_json:
        print(json.dumps([one._asdict() | {"folder": str(one.folder)} for one in entries], indent=1))
        return
    for entry in entries:
        print(entry)
    print(f"{len(entries)} in {_folder(folder)}, {sum(entry.size for entry in entries) / 1e6:.1f} MB")


@app.command()
def clean(
    folder: Folder = None,
    unused: Annotated[float, typer.Option("--unused", min=0, help="Only what no run used for so many days.")] = 0.0,
) -> None:
    """Remove tokens, and what killed runs left in /tmp. A run that reads tokens at this moment keeps them.

    dray cache clean --unused 30
    """
    freed = 0
    for entry in list(_entries(_checked(folder))):
        made_now = ".part-" in entry.folder.name and entry.unused * _DAY < _WRITES
        if entry.unused >= unused and not made_now:
            shutil.rmtree(entry.folder)
            freed += entry.size
            print(f"removed {entry.folder}")
    for left in scratch.clear_left_over(node.SCRATCH):
        print(f"removed {left}")
    print(f"{freed / 1e6:.1f} MB of tokens removed")


def _folder(given: Path | None) -> Path:
    return given or Path(f"{node.TOKENS}{os.getuid()}")


def _checked(given: Path | None) -> Path:
    """Nothing of another user's is read or removed."""
    folder = _folder(given)
    if given and not folder.is_dir():
        raise ConfigError("there is no such cache", where=folder, fix="name the folder that data.cache_dir names")
    trouble = open_to_others(folder, folder=True) if os.path.lexists(folder) else ""
    if trouble:
        raise ConfigError(
            "the cache is open to other users",
            where=folder,
            wanted=f"a folder of user {os.getuid()} in which no other may write",
            found=trouble,
            fix="set data.cache_dir to a folder of your own",
        )
    return folder


def _entries(cache: Path) -> Iterator[Entry]:
    for folder in cache.iterdir() if cache.is_dir() else ():
        if not _TOKENS.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        files = [path.lstat() for path in folder.iterdir()]
        used = max((file.st_mtime for file in files), default=folder.stat().st_mtime)
        try:
            dataset = str(json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["dataset"])
        except (OSError, ValueError, LookupError, TypeError):
            dataset = "(incomplete)"
        yield Entry(folder, dataset, sum(file.st_size for file in files), (time.time() - used) / _DAY)
