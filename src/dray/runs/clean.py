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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, run_folder
from dray.contract.findings import DrayError, counted
from dray.runs import live, named, squeue
from dray.runs.live import State
from dray.runs.reading import dig, table
from dray.runs.result import result_of
from dray.runs.write import read

KINDS = ("runs", "tokens", "builds", "layers")
DEFAULT = KINDS[:-1]
"""All but layers: recipes name layers, and building one again needs a network."""
_DAY = 86400.0
_QUIET_DAYS = 1.0  # a run without a result may be active on another cluster that shares this disk
_HOUR_DAYS = 1 / 24
_TEMPORARY = re.compile(r"\.(dray-[a-z0-9._-]+|debs|lock|pull|wheels)-[a-z0-9_]{8}")
_LAYER = re.compile(r"dray-[a-z0-9_]+-[a-z0-9._-]+\.sif")
_TOKENS = re.compile(r"[0-9a-f]{24}(\.part-[0-9a-f]{16})?")
_MODEL = "has checkpoints or a model (--checkpoints)"


class Options(NamedTuple):
    """What the user asked for."""

    kinds: tuple[str, ...]
    days: float
    checkpoints: bool
    runs: Path
    build: Path | None
    """The checkout's folder for images; None without a checkout."""
    tokens: Path


class Item(NamedTuple):
    """A file or folder that dray may remove."""

    kind: str
    path: Path
    holds: str
    parts: tuple[Path, ...]
    """The parts that would be removed; empty if it is kept."""
    size: int
    """Bytes that would be freed, or of the whole item if it is kept."""
    age: float
    """Days since anything in it changed, or was used."""
    seen: tuple[int, float]
    """Size and last change of the whole item."""
    kept: str = ""
    """Why it is kept."""

    def data(self) -> dict[str, object]:
        """For JSON."""
        shown = {"kind": self.kind, "path": str(self.path), "bytes": self.size, "days": round(self.age, 2)}
        return {**shown, "holds": self.holds, "removes": [str(part) for part in self.parts], "kept": self.kept}


def items(options: Options) -> list[Item]:
    """All items of these kinds, the largest first."""
    disk = _Disk(options)
    found = [disk.checked(item) for kind in options.kinds for item in getattr(disk, kind)()]
    return sorted(found, key=lambda item: item.size, reverse=True)


def remove(item: Item) -> str:
    """Remove an item unless it changed since it was listed; what went wrong, or an empty text."""
    try:
        if measured(item.path) != item.seen:
            return "it changed since it was listed"
        for part in item.parts:
            if stat.S_ISDIR(part.lstat().st_mode):
                shutil.rmtree(part)
            else:
                part.unlink()
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def measured(path: Path) -> tuple[int, float]:
    """Bytes on the disk, and the time of the last change; links are not followed."""
    status = path.lstat()
    size, changed = status.st_blocks * 512, status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        with suppress(OSError), os.scandir(path) as entries:  # an unreadable folder, or one that was removed
            for entry in entries:
                inner, at = measured(Path(entry.path))
                size, changed = size + inner, max(changed, at)
    return size, changed


def _item(kind: str, path: Path, holds: str, *parts: Path, used: float = 0.0, kept: str = "") -> Item:
    """An item with its size and age; without `parts`, the whole path would be removed."""
    seen = measured(path)
    removed = () if kept else parts or (path,)
    each = [measured(part) for part in removed] or [seen]
    age = (time.time() - max(used, *(changed for _, changed in each))) / _DAY
    return Item(kind, path, holds, removed, sum(size for size, _ in each), age, seen, kept)


def _own(path: Path, *, folder: bool = True) -> bool:
    """Whether it belongs to this user and is no link."""
    with suppress(OSError):
        status = path.lstat()
        kind = stat.S_ISDIR if folder else stat.S_ISREG
        return kind(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _inside(folder: Path | None) -> list[Path]:
    """What is in a folder of this user; nothing without one."""
    return sorted(folder.iterdir()) if folder and _own(folder) else []


class _Disk:
    """The items of each kind. A method for each of KINDS."""

    def __init__(self, options: Options) -> None:
        self._options, queue = options, squeue.Queue()
        folders = [options.runs, *(folder for folder in _inside(options.runs) if (folder / run_folder.TUNE).exists())]
        runs = [run for folder in filter(_own, folders) for run in named.every(folder) if _own(run)]
        self._runs = [live.look(run, queue) for run in runs]
        self._active = [state for state in self._runs if state.kind != "ended"]
        self._needed = [Path(path) for state in self._active for path in _needs(state)]

    def checked(self, item: Item) -> Item:
        """The item, kept if it is too young or if an active run needs it."""
        days, kept = self._options.days, item.kept
        if any(path == part or part in path.parents for part in item.parts for path in self._needed):
            kept = "an active run needs it"
        if not kept and item.age < days:
            kept = f"younger than {counted(days, 'day') if days >= 1 else counted(round(days * 24), 'hour')}"
        return item._replace(parts=(), kept=kept, size=item.seen[0]) if kept else item

    def runs(self) -> Iterator[Item]:
        """Run folders; of one with a model only the compiled code."""
        for state in self._runs:
            parts, kept, holds = (state.run,), "", _holds(state)
            quiet = (time.time() - measured(state.run)[1]) / _DAY
            if state.kind == "unknown":
                kept = "active, or this machine cannot tell"
            elif state.kind != "ended":
                kept = f"active: {state.where}"
            elif state.paths and not state.paths.result.exists() and quiet < _QUIET_DAYS:
                kept = "has no result and changed today"
            elif _has_model(state.run) and not self._options.checkpoints:
                parts = (state.run / run_folder.COMPILED,)
                holds, kept = "compiled code; checkpoints and model stay", "" if _own(parts[0]) else _MODEL
            yield _item("runs", state.run, holds, *parts, kept=kept)

    def tokens(self) -> Iterator[Item]:
        """Tokens of datasets, each in a folder of its own."""
        cache = self._options.tokens
        if os.path.lexists(cache) and (why := files.open_to_others(cache, folder=True)):
            yield _item("tokens", cache, "tokens of datasets", kept=why)
            return
        for folder in _inside(cache):
            if _TOKENS.fullmatch(folder.name) and _own(folder):
                dataset = dig(table(folder / "manifest.json", []), "dataset") or "(incomplete)"
                found = _item("tokens", folder, str(dataset))
                written = ".part-" in folder.name and found.age < _HOUR_DAYS
                yield found._replace(parts=(), kept="is being written") if written else found

    def builds(self) -> Iterator[Item]:
        """Folders that killed builds left, and folders that failed builds kept for inspection."""
        build = self._options.build
        if build:
            kept = "a build is running" if any(map(_is_locked, (build / "logs").glob("*.log"))) else ""
            killed = [path for path in _inside(build) if _TEMPORARY.fullmatch(path.name)]
            for path in filter(_own, [*killed, *_inside(build / "failed")]):
                yield _item("builds", path, "left by a killed or failed build", kept=kept)

    def layers(self) -> Iterator[Item]:
        """Layers with their records; the lock stays, so that the same bytes can be built again."""
        waiting = any(state.paths is None for state in self._active)
        for sif in _inside(self._options.build):
            if _LAYER.fullmatch(sif.name) and _own(sif, folder=False) and sif.with_suffix(".lock").is_file():
                record = sif.with_name(f"{sif.name}.json")
                parts = [part for part in (sif, record) if _own(part, folder=False)]
                kept = "a job in the queue may need it" if waiting else ""
                yield _item("layers", sif, "a layer; its lock stays", *parts, used=sif.stat().st_atime, kept=kept)


def _has_model(run: Path) -> bool:
    """Whether there are checkpoints, a final model, an adapter or exports; True if the folder cannot be read."""
    folders = [run / name for name in (run_folder.CHECKPOINTS, "exports")]
    try:
        return any(any(folder.iterdir()) for folder in folders if folder.is_dir())
    except OSError:
        return True


def _holds(state: State) -> str:
    if state.paths is None:
        return "no attempt"
    result = result_of(state.paths)
    status = result.status if result and result.status.isalpha() else "no result"
    return f"{status}{', checkpoints or a model' if _has_model(state.run) else ''}"


def _needs(state: State) -> Iterator[str]:
    """The paths that an active run binds, starts and saves to, besides its own folder."""
    if state.paths is None:
        return
    with suppress(DrayError, OSError):
        plan = read(state.paths)
        yield from (plan.image, plan.stage, plan.recipe.checkpoint.folder, plan.layer.file if plan.layer else "")
        yield from (bind.path for bind in plan.binds)
        yield from plan.recipe.places().values()


def _is_locked(file: Path) -> bool:
    """Whether a process on this machine holds the lock of a file."""
    try:
        with files.open_regular(file, link=False) as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
