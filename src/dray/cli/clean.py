"""`dray clean`: remove what is old, and nothing that a live run needs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.args import Runs
from dray.config import dray_home
from dray.contract import exit_codes, node
from dray.contract.findings import ConfigError, DrayError, counted
from dray.runs import clean as disk
from dray.runs.store import default_runs

_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


def _age(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,5}[hdw]", text):
        raise ConfigError("--older-than has a wrong value", wanted="30d, 12h or 4w", found=ascii(text))
    return text


def clean(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help=f"{', '.join(disk.KINDS)}. Default: all.")
    ] = None,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="AGE",
            callback=_age,
            help="Only what was unchanged and unused for this long, such as 30d, 12h or 4w.",
        ),
    ] = "30d",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Remove also whole runs that have checkpoints or a model.")
    ] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help=f"The recipes' data.cache_dir, for tokens. Default: {node.TOKENS}UID."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list; without --yes, remove nothing.")] = False,
    runs: Runs = None,
) -> None:
    """Show old runs, tokens of datasets and left-over files of builds, and remove them if you agree.

    A run with checkpoints or a model loses only its compiled code.

    dray clean runs --older-than 60d --dry-run
    dray clean tokens --cache-dir /scratch/me/tokens
    """
    for kind in kinds or ():
        if kind not in disk.KINDS:
            raise ConfigError("KIND has a wrong value", wanted=", ".join(disk.KINDS), found=ascii(kind))
    days = int(older_than[:-1]) * _DAYS[older_than[-1]]
    items = disk.items(
        kinds or disk.KINDS,
        runs=(runs or default_runs()).absolute(),
        tokens=(cache_dir or Path(f"{node.TOKENS}{os.getuid()}")).absolute(),
        build=_build(),
        days=days,
        checkpoints=checkpoints,
    )
    old = [item for item in items if not item.kept]
    if as_json:
        print(json.dumps([item._asdict() for item in items], indent=1, default=str))
    else:
        for item in items:
            why = f"kept: {item.kept}" if item.kept else item.holds
            print(f"{_size(item.bytes):>10}  {item.days:6.1f} days  {item.kind:<8}{item.removes}  {why}")
        print(f"to remove: {counted(len(old), 'thing')}, {_size(sum(item.bytes for item in old))}")
    if dry_run or not old or (as_json and not yes):
        return
    if not yes and not _agreed(len(old)):
        print("nothing was removed")
        raise typer.Exit(exit_codes.FAILED)
    freed, failed = 0, 0
    for item in old:
        if why := disk.remove(item):
            failed += 1
            print(f"dray: warning: {item.path} was not removed: {why}", file=sys.stderr)
        else:
            freed += item.bytes
    if not as_json:
        print(f"removed: {_size(freed)}")
    raise typer.Exit(exit_codes.FAILED if failed else exit_codes.DONE)


def _build() -> Path | None:
    try:
        return dray_home.root() / "build"
    except DrayError:
        return None


def _agreed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "confirmation needs a terminal", found="standard input is not a terminal", fix="add --yes, or --dry-run"
        )
    return typer.confirm(f"remove {'it' if count == 1 else 'them'}?")


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
