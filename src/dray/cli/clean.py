"""`dray clean`: remove what is old, and nothing that a live run needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from dray.cli import times
from dray.cli.args import Runs
from dray.contract import exit_codes, node
from dray.contract.findings import counted
from dray.runs import clean as disk
from dray.runs.store import default_runs


def clean(
    kind: Literal["runs", "tokens"] | None = None,
    older_than: str = "30d",
    checkpoints: bool = False,
    cache_dir: Path | None = None,
    yes: bool = False,
    runs: Runs = None,
) -> int:
    """Show old runs and tokens of datasets; with --yes remove them.

    KIND: Only these. Default: both.
    --older-than AGE: Only what was unchanged for this long, such as 30d, 12h or 4w.
    --checkpoints: Remove also runs that have checkpoints or a model.
    --cache-dir FOLDER: The recipes' data.cache_dir, for tokens. Default: /tmp/dray-tokens-UID.
    --yes: Remove them.

    dray clean runs --older-than 60d
    dray clean tokens --cache-dir /scratch/me/tokens --yes
    """
    items = disk.items(
        [kind] if kind else ["runs", "tokens"],
        runs=(runs or default_runs()).absolute(),
        tokens=(cache_dir or Path(f"{node.TOKENS}{os.getuid()}")).absolute(),
        days=times.age("--older-than", older_than) / 86400,
        checkpoints=checkpoints,
    )
    old = [item for item in items if not item.kept]
    for item in items:
        why = f"kept: {item.kept}" if item.kept else item.holds
        print(f"{_size(item.bytes):>10}  {item.days:6.1f} days  {item.kind:<8}{item.path}  {why}")
    print(f"to remove: {counted(len(old), 'folder')}, {_size(sum(item.bytes for item in old))}")
    if not yes:
        if old:
            print("dray clean --yes, with the same options, removes them")
        return exit_codes.DONE
    code = exit_codes.DONE
    for item in old:
        if why := disk.remove(item):
            print(f"dray: warning: {item.path} was not removed: {why}", file=sys.stderr)
            code = exit_codes.FAILED
    return code


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
