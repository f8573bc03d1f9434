"""What dray keeps on this machine's disks: what may be removed, and why the rest stays.

Files that an active run needs and other users' files are never removed, and no link is followed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, run_folder
from dray.contract.findings import DrayError
from dray.runs.slurm import Slurm
from dray.runs.status import LOST, NO_RESULT, State, status
from dray.runs.store import dig, newest_first, plan_of, read_json

_DAY = 86400.0
_HOUR = 1 / 24
_QUIET_DAYS = 1.0  # a run without a result may be active on another cluster that shares this disk
_TOKENS = re.compile(r"[0-9a-f]{24}(\.part-[0-9a-f]{16})?")


class Item(NamedTuple):
    """A folder that dray may remove."""

    kind: str
    path: Path
    holds: str
    bytes: int
    changed: float
    """When anything in it changed."""
    kept: str = ""
    """Why it is kept; empty if it may go."""

    @property
    def days(self) -> float:
        """Days since anything in it changed."""
        return (time.time() - self.changed) / _DAY


def items(kinds: Iterable[str], *, runs: Path, tokens: Path, days: float, checkpoints: bool) -> list[Item]:
    """All items of these kinds, the largest first; those that changed within so many days are kept."""
    slurm = Slurm()
    tuned = [folder for folder in _inside(runs) if (folder / run_folder.STUDY).exists()]
    folders = [run for folder in (runs, *tuned) for run in newest_first(folder)]
    states = [status(run, slurm) for run in folders if _own(run)]
    needed = [Path(path) for state in states if state.kind != "ended" for path in _needs(state)]
    found: list[Item] = []
    if "runs" in kinds:
        found += [_run(state, checkpoints=checkpoints) for state in states]
    if "tokens" in kinds:
        found += tokens_in(tokens)
    checked = []
    for item in found:
        why = item.kept
        if not why and any(path == item.path or item.path in path.parents for path in needed):
            why = "an active run needs it"
        if not why and item.days < days:
            why = "changed since --older-than"
        checked.append(item._replace(kept=why))
    return sorted(checked, key=lambda item: item.bytes, reverse=True)


def remove(item: Item) -> str:
    """Remove an item unless it changed since it was listed; what went wrong, or an empty text."""
    try:
        if _measured(item.path) != (item.bytes, item.changed):
            return "it changed since it was listed"
        shutil.rmtree(item.path)
        if item.kind == "tokens":  # a run that was killed leaves its lock
            item.path.with_name(f".{item.path.name.partition('.')[0]}.lock").unlink(missing_ok=True)
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def _measured(path: Path) -> tuple[int, float]:
    """Bytes on the disk, and the time of the last change; links are not followed."""
    size, changed = 0, 0.0
    for part in (path, *path.rglob("*")):
        with suppress(OSError):  # removed meanwhile
            about = part.lstat()
            size, changed = size + about.st_blocks * 512, max(changed, about.st_mtime)
    return size, changed


def _own(folder: Path) -> bool:
    """Whether it is a folder of this user, and no link."""
    with suppress(OSError):
        about = folder.lstat()
        return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    return False


def _inside(folder: Path) -> list[Path]:
    """This user's folders in a folder of this user."""
    return sorted(filter(_own, folder.iterdir())) if _own(folder) else []


def _run(state: State, *, checkpoints: bool) -> Item:
    item = Item("runs", state.path, state.state, *_measured(state.path))
    kept = ""
    if state.kind == "unknown":
        kept = "active, or this machine cannot tell"
    elif state.kind != "ended":
        kept = f"active: {state.where}"
    elif state.attempt and state.state in (LOST, NO_RESULT) and item.days < _QUIET_DAYS:
        kept = "has no result and changed today"
    elif not checkpoints and _has_model(state.path):
        kept = "has checkpoints or a model (--checkpoints)"
    return item._replace(kept=kept)


def _has_model(run: Path) -> bool:
    """Whether there are checkpoints, a final model, an adapter or exports; True if the folder cannot be read."""
    folders = [run / name for name in (run_folder.CHECKPOINTS, "exports")]
    try:
        return any(any(folder.iterdir()) for folder in folders if folder.is_dir())
    except OSError:
        return True


def _needs(state: State) -> Iterator[str]:
    """The paths that an active run binds, starts and saves to, besides its own folder."""
    if state.paths is None:
        return
    with suppress(DrayError, OSError):
        plan = plan_of(state.paths)
        yield from (plan.image, plan.stage, plan.recipe.checkpoint.folder, plan.layer.file if plan.layer else "")
        yield from (bind.path for bind in plan.binds)
        yield from plan.recipe.places().values()


def tokens_in(cache: Path) -> Iterator[Item]:
    """The tokens of datasets in a cache, each in a folder of its own."""
    if os.path.lexists(cache) and (why := files.open_to_others(cache, folder=True)):
        yield Item("tokens", cache, "tokens of datasets", 0, 0.0, kept=why)
        return
    for folder in _inside(cache):
        if _TOKENS.fullmatch(folder.name):
            dataset = dig(read_json(folder / "manifest.json", []), "dataset") or "(incomplete)"
            item = Item("tokens", folder, str(dataset), *_measured(folder))
            written = ".part-" in folder.name and item.days < _HOUR
            yield item._replace(kept="is being written") if written else item
