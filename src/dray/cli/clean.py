"""`dray clean`: remove what is old, and nothing that a live run needs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import Runs
from dray.config import dray_home
from dray.contract import exit_codes, files, node
from dray.contract.findings import ConfigError, DrayError, counted
from dray.runs import clean as old
from dray.runs.leftovers import Item
from dray.runs.store import default_runs

_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


def _age(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,5}[hdw]", text):
        raise ConfigError("--older-than has a wrong value", wanted="30d, 12h or 4w", found=ascii(text))
    return text


def clean(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help=f"{', '.join(old.KINDS)}. Default: all but layers.")
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
    """Show old runs, studies, tokens, images and left-over files of builds, and remove them if you agree.

    A run with checkpoints or a model loses only its compiled code. Layers are removed only if you name that kind.

    dray clean runs --older-than 60d --dry-run
    dray clean tokens --cache-dir /scratch/me/tokens
    """
    for kind in kinds or ():
        if kind not in old.KINDS:
            raise ConfigError("KIND has a wrong value", wanted=", ".join(old.KINDS), found=ascii(kind))
    wanted = old.Options(
        tuple(dict.fromkeys(kinds or old.DEFAULT)), int(older_than[:-1]) * _DAYS[older_than[-1]], checkpoints,
        (runs or default_runs()).absolute(), _build(), _tokens(cache_dir),
    )  # fmt: skip
    items = old.look(wanted)
    going = [item for item in items if item.parts]
    if as_json:
        print(json.dumps([item.data() for item in items], indent=1))
    else:
        _show(items, going)
    if dry_run or not going or (as_json and not yes):
        return
    if not yes and not _agreed(going):
        print("nothing was removed")
        raise typer.Exit(exit_codes.FAILED)
    refused = {item.path: why for item in going if (why := old.remove(item))}
    for path, why in refused.items():
        print(f"dray: warning: {path} was not removed: {why}", file=sys.stderr)
    if not as_json:
        print(f"removed: {_size(sum(item.size for item in going if item.path not in refused))}")
    raise typer.Exit(exit_codes.FAILED if refused else exit_codes.DONE)


def _tokens(named: Path | None) -> Path:
    """The folder with tokens; what another user may change in it is neither read nor removed."""
    if named is None:
        return Path(f"{node.TOKENS}{os.getuid()}")
    wrong = files.open_to_others(named, folder=True) if os.path.lexists(named) else "it does not exist"
    if wrong:
        raise ConfigError(
            "dray cannot clean this folder of tokens", where=f"--cache-dir {named}", found=wrong,
            wanted=f"a folder of user {os.getuid()} to which no other user may write",
            fix="--cache-dir FOLDER, as data.cache_dir names it",
        )  # fmt: skip
    return named.absolute()


def _build() -> Path | None:
    try:
        return dray_home.root() / "build"
    except DrayError:
        return None


def _show(items: list[Item], going: list[Item]) -> None:
    for item in going:
        print(f"{_size(item.size):>10}  {item.age:6.1f} days  {item.kind:<8}{item.path}  {item.holds}")
    why = Counter((item.kind, item.kept.partition(":")[0]) for item in items if item.kept)
    for (kind, reason), count in sorted(why.items()):
        size = sum(item.size for item in items if (item.kind, item.kept.partition(":")[0]) == (kind, reason))
        print(f"kept: {count} of {kind}, {_size(size)}: {reason}")
    print(f"to remove: {counted(len(going), 'thing')}, {_size(sum(item.size for item in going))}")


def _agreed(going: list[Item]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "confirmation needs a terminal", found="standard input is not a terminal", fix="add --yes, or --dry-run"
        )
    return typer.confirm(f"remove {'it' if len(going) == 1 else 'them'}?")


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
