"""`dray clean`: remove what is old, and nothing that a live run needs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.args import Runs
from dray.contract import exit_codes, node
from dray.contract.findings import ConfigError, counted
from dray.runs import clean as disk
from dray.runs.store import default_runs

_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


def clean(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help=f"{', '.join(disk.KINDS)}. Default: all.")
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only what was unchanged for this long, such as 30d, 12h or 4w.")
    ] = "30d",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Remove also runs that have checkpoints or a model.")
    ] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help=f"The recipes' data.cache_dir, for tokens. Default: {node.TOKENS}UID."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    runs: Runs = None,
) -> None:
    """Show old runs and tokens of datasets, and remove them if you agree.

    dray clean runs --older-than 60d --dry-run
    dray clean tokens --cache-dir /scratch/me/tokens
    """
    for kind in kinds or ():
        if kind not in disk.KINDS:
            raise ConfigError("KIND has a wrong value", wanted=", ".join(disk.KINDS), found=ascii(kind))
    if not re.fullmatch(r"[0-9]{1,5}[hdw]", older_than):
        raise ConfigError("--older-than has a wrong value", wanted="30d, 12h or 4w", found=ascii(older_than))
    items = disk.items(
        kinds or disk.KINDS,
        runs=(runs or default_runs()).absolute(),
        tokens=(cache_dir or Path(f"{node.TOKENS}{os.getuid()}")).absolute(),
        days=int(older_than[:-1]) * _DAYS[older_than[-1]],
        checkpoints=checkpoints,
    )
    old = [item for item in items if not item.kept]
    for item in items:
        why = f"kept: {item.kept}" if item.kept else item.holds
        print(f"{_size(item.bytes):>10}  {item.days:6.1f} days  {item.kind:<8}{item.path}  {why}")
    print(f"to remove: {counted(len(old), 'folder')}, {_size(sum(item.bytes for item in old))}")
    if dry_run or not old:
        return
    if not yes and not _agreed():
        print("nothing was removed")
        raise typer.Exit(exit_codes.FAILED)
    failed = False
    for item in old:
        if why := disk.remove(item):
            failed = True
            print(f"dray: warning: {item.path} was not removed: {why}", file=sys.stderr)
    raise typer.Exit(exit_codes.FAILED if failed else exit_codes.DONE)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "confirmation needs a terminal", found="standard input is not a terminal", fix="add --yes, or --dry-run"
        )
    return typer.confirm("remove them?")


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
