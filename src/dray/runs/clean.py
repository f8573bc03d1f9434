"""What dray keeps on this machine's disks: what may be removed, and why the rest stays.

Files that an active run needs and other users' files are never removed, and no link is followed.
"""

from __future__ import annotations

import fcntl
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
from dray.contract.findings import DrayError, counted
from dray.runs.slurm import Slurm
from dray.runs.status import LOST, NO_RESULT, State, status
from dray.runs.store import dig, newest_first, plan_of, read_json

KINDS = ("runs", "tokens", "builds")
_DAY = 86400.0
_HOUR = 1 / 24
_QUIET_DAYS = 1.0  # a run without a result may be active on another cluster that shares this disk
_TEMPORARY = re.compile(r"\.(dray-[a-z0-9._-]+|debs|lock|pull|wheels)-[a-z0-9_]{8}")
_TOKENS = re.compile(r"[0-9a-f]{24}(\.part-[0-9a-f]{16})?")


class Item(NamedTuple):
    """A file or folder that dray may remove."""

    kind: str
    path: Path
    holds: str
    removes: Path
    """What would be removed: the path, or a part of it."""
    bytes: int
    days: float
    """Days since anything in it changed."""
    seen: tuple[int, float]
    """Bytes and last change of the whole path."""
    kept: str
    """Why it is kept; empty if it may go."""


def items(
    kinds: Iterable[str], *, runs: Path, tokens: Path, build: Path | None, days: float, checkpoints: bool
) -> list[Item]:
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
    if "builds" in kinds:
        found += _builds(build)
    checked = []
    for item in found:
        why = item.kept
        if not why and any(path == item.removes or item.removes in path.parents for path in needed):
            why = "an active run needs it"
        if not why and item.days < days:
            why = f"younger than {counted(round(days), 'day') if days >= 1 else counted(round(days * 24), 'hour')}"
        checked.append(item._replace(kept=why))
    return sorted(checked, key=lambda item: item.bytes, reverse=True)


def remove(item: Item) -> str:
    """Remove an item unless it changed since it was listed; what went wrong, or an empty text."""
    try:
        if _measured(item.path) != item.seen:
            return "it changed since it was listed"
        shutil.rmtree(item.removes)
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


def _item(kind: str, path: Path, holds: str, removes: Path | None = None, kept: str = "") -> Item:
    seen = _measured(path)
    size, changed = _measured(removes) if removes else seen
    return Item(kind, path, holds, removes or path, size, (time.time() - changed) / _DAY, seen, kept)


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
    """A run folder; of one with a model only the compiled code."""
    item = _item("runs", state.path, state.state)
    if state.kind == "unknown":
        return item._replace(kept="active, or this machine cannot tell")
    if state.kind != "ended":
        return item._replace(kept=f"active: {state.where}")
    if state.attempt and state.state in (LOST, NO_RESULT) and item.days < _QUIET_DAYS:
        return item._replace(kept="has no result and changed today")
    if _has_model(state.path) and not checkpoints:
        compiled = state.path / run_folder.COMPILED
        if not _own(compiled):
            return item._replace(kept="has checkpoints or a model (--checkpoints)")
        return _item("runs", state.path, "compiled code; checkpoints and model stay", compiled)
    return item


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
        yield _item("tokens", cache, "tokens of datasets", kept=why)
        return
    for folder in _inside(cache):
        if _TOKENS.fullmatch(folder.name):
            dataset = dig(read_json(folder / "manifest.json", []), "dataset") or "(incomplete)"
            item = _item("tokens", folder, str(dataset))
            written = ".part-" in folder.name and item.days < _HOUR
            yield item._replace(kept="is being written") if written else item


def _builds(build: Path | None) -> Iterator[Item]:
    """Folders that killed builds left, and folders that failed builds kept for inspection."""
    if build:
        kept = "a build is running" if any(map(_is_locked, (build / "logs").glob("*.log"))) else ""
        killed = [path for path in _inside(build) if _TEMPORARY.fullmatch(path.name)]
        for path in [*killed, *_inside(build / "failed")]:
            yield _item("builds", path, "left by a killed or failed build", kept=kept)


def _is_locked(file: Path) -> bool:
    """Whether a process on this machine holds the lock of a file."""
    try:
        log = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # NFS locks no file read-only
    except OSError:
        return file.exists()
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(log)
    return False
