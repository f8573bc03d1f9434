"""`dray cache`: tokenized datasets that runs keep on this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from dray.contract import node, scratch
from dray.contract.files import open_to_others
from dray.contract.findings import ConfigError
from dray.runs import tokens

app = typer.Typer(no_args_is_help=True, help="List and remove the tokenized datasets on this machine.")

Folder = Annotated[
    Path | None, typer.Argument(metavar="[FOLDER]", help=f"A folder of data.cache_dir. Default: {node.TOKENS}UID.")
]


@app.command("list")
def show(
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")] = False,
) -> None:
    """Print each tokenized dataset: size, days since a run used it, folder, dataset.

    dray cache list --json
    """
    entries = sorted(tokens.entries(_checked(folder)), key=lambda entry: entry.unused)
    if as_json:
        print(json.dumps([one._asdict() | {"folder": str(one.folder)} for one in entries], indent=1))
        return
    for entry in entries:
        print(entry)
    print(f"{len(entries)} in {_folder(folder)}, {sum(entry.size for entry in entries) / 1e6:.1f} MB")


@app.command()
def clean(
    folder: Folder = None,
    unused: Annotated[
        float, typer.Option("--unused", min=0, help="Remove only what no run has used for this many days.")
    ] = 0.0,
) -> None:
    """Remove tokenized datasets, and what killed runs left in /tmp. A run that has a dataset open can still read it.

    dray cache clean --unused 30
    """
    freed = 0
    for entry in list(tokens.entries(_checked(folder))):
        if entry.unused >= unused and not entry.made_now:
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
        raise ConfigError(
            "the cache folder does not exist", where=folder, fix="give the folder that data.cache_dir names"
        )
    trouble = open_to_others(folder, folder=True) if os.path.lexists(folder) else ""
    if trouble:
        raise ConfigError(
            "the cache is open to other users",
            where=folder,
            wanted=f"a folder of user {os.getuid()} to which no other user may write",
            found=trouble,
            fix="set data.cache_dir to a folder of your own",
        )
    return folder
