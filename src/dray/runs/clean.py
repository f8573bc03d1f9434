"""What dray keeps on this machine's disks: what may be removed, and why the rest stays.

Files that an active run needs and other users' files are never removed, and no link is followed.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dray.contract import files, node, run_folder, scratch
from dray.contract.findings import DrayError, counted
from dray.runs import leftovers, slurm, status, study, tokens
from dray.runs.leftovers import DAY, Item, measured
from dray.runs.result import result_of
from dray.runs.status import State
from dray.runs.store import every, last_attempt, read_json
from dray.runs.write import read

KINDS = ("runs", "tune", "studies", "tokens", "scratch", "staged", "builds", "layers")
DEFAULT = KINDS[:-1]
"""All but layers: recipes name layers, and building one again needs a network."""
_QUIET_DAYS = 1.0  # a run without a result may be active on another cluster that shares this disk


class Options(NamedTuple):
    """What the user asked for."""

    kinds: tuple[str, ...]
    days: float
    checkpoints: bool
    runs: Path
    build: Path | None
    """The checkout's folder for images; None without a checkout."""
    tokens: Path


def look(options: Options) -> list[Item]:
    """All items of these kinds, the largest first."""
    queue = slurm.Slurm()
    states = _states(options.runs, queue)
    tried = {folder: _states(folder, queue) for folder in leftovers.tables(options.runs)}
    every = [*states, *chain.from_iterable(tried.values())]
    going = [state for state in every if _goes_on(state)]
    waiting = any(state.paths is None for state in going)
    makers: dict[str, Callable[[], Iterator[Item]]] = {
        "runs": lambda: (_run(state, options) for state in states),
        "tune": lambda: (_table(folder, runs, options) for folder, runs in tried.items()),
        "studies": lambda: (_study(folder, queue) for folder in leftovers.tables(options.runs, run_folder.STUDY)),
        "tokens": lambda: _tokens(options.tokens),
        "scratch": _scratch,
        "staged": lambda: leftovers.staged(_stages([state.path for state in every])),
        "builds": lambda: leftovers.builds(options.build),
        "layers": lambda: leftovers.layers(options.build, waiting=waiting),
    }
    needed = [Path(path) for state in going for path in _needs(state)]
    found = [_checked(item, needed, options) for kind in options.kinds for item in makers[kind]()]
    return sorted(found, key=lambda item: item.size, reverse=True)


def remove(item: Item) -> str:
    """Remove an item unless it changed since it was listed; what went wrong, or an empty text."""
    size, changed = measured(item.path)
    if (size, changed) != (item.whole, item.changed):
        return "it changed since it was listed"
    try:
        with leftovers.taken(item.lock) as free:
            if not free:
                return "a run uses it now"
            for part in item.parts:
                if stat.S_ISDIR(part.lstat().st_mode):
                    shutil.rmtree(part)
                else:
                    part.unlink()
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def _states(runs: Path, queue: slurm.Slurm) -> list[State]:
    return [status.status(run, queue) for run in every(runs) if _own(run)]


def _own(path: Path) -> bool:
    with suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _goes_on(state: State) -> bool:
    return state.kind != "ended"


def _run(state: State, options: Options) -> Item:
    run = state.path
    size, changed = measured(run)
    age = (time.time() - changed) / DAY
    item = Item("runs", run, size, age, _holds(state), (run,), whole=size, changed=changed)
    if _goes_on(state):
        known = f": {state.where}" if state.where else ""
        return item.stays("active, or this machine cannot tell" if state.kind == "unknown" else f"active{known}")
    if state.paths and not state.paths.result.exists() and age < _QUIET_DAYS:
        return item.stays("has no result and changed today")
    if _models(run) and not options.checkpoints:
        compiled = run / run_folder.COMPILED
        if not _own(compiled):
            return item.stays("has checkpoints or a model (--checkpoints)")
        freed = measured(compiled)[0]
        return item._replace(size=freed, parts=(compiled,), holds="compiled code; checkpoints and model stay")
    return item


def _table(folder: Path, runs: list[State], options: Options) -> Item:
    """A table of `dray tune` with all its runs: without them its rows cannot be checked."""
    item = leftovers.item("tune", folder, f"a table of dray tune, {counted(len(runs), 'run')}")
    if any(map(_goes_on, runs)):
        return item.stays("one of its runs is active, or this machine cannot tell")
    complete = (read_json(folder / run_folder.TUNE, []) or {}).get("complete") is True
    if not complete and item.age < _QUIET_DAYS:
        return item.stays("is not complete and changed today")
    if not options.checkpoints and any(_models(state.path) for state in runs):
        return item.stays("has checkpoints or a model (--checkpoints)")
    return item


def _study(folder: Path, queue: slurm.Slurm) -> Item:
    """A study of `dray scale` or `dray sweep`, removed after its runs: the table shows their figures."""
    item = leftovers.item("studies", folder, "the table of a study")
    try:
        members = study.load(folder).members
        if any(os.path.lexists(folder.parent / member.run) for member in members):
            return item.stays("its runs still exist")
        jobs = {str(member.job) for member in members if member.job}
        if jobs and not jobs.isdisjoint(job.id.partition("_")[0] for job in queue.jobs()):
            return item.stays("one of its jobs is in the queue")
    except DrayError as failed:
        return item.stays(failed.problem)
    return item


def _models(run: Path) -> bool:
    """Whether there are checkpoints, a final model, an adapter or exports; True if the folder cannot be read."""
    folders = [run / name for name in (run_folder.CHECKPOINTS, "exports")]
    try:
        return any(any(folder.iterdir()) for folder in folders if folder.is_dir())
    except OSError:
        return True


def _holds(state: State) -> str:
    if state.paths is None:
        return "no attempt"
    found = result_of(state.paths)
    model = ", checkpoints or a model" if _models(state.path) else ""
    return f"{found.status if found and found.status.isalpha() else 'no result'}{model}"


def _needs(state: State) -> Iterator[str]:
    """The paths that an active run binds, starts and saves to, besides its own folder."""
    if state.paths is None:
        return
    with suppress(DrayError, OSError):
        plan = read(state.paths)
        yield from (plan.image, plan.stage, plan.recipe.checkpoint.folder, plan.layer.file if plan.layer else "")
        yield from (bind.path for bind in plan.binds)
        yield from plan.recipe.places().values()


def _checked(item: Item, needed: list[Path], options: Options) -> Item:
    if item.kept:
        return item
    if item.age < options.days:
        age = counted(options.days, "day") if options.days >= 1 else counted(round(options.days * 24), "hour")
        return item.stays(f"younger than {age}")
    if any(part == one or part in one.parents for part in item.parts for one in needed):
        return item.stays("an active run needs it")
    return item


def _tokens(cache: Path) -> Iterator[Item]:
    if os.path.lexists(cache) and (why := files.open_to_others(cache, folder=True)):
        yield leftovers.item("tokens", cache, "tokens of datasets").stays(why)
        return
    for entry in tokens.entries(cache):
        size, changed = measured(entry.folder)
        item = Item(
            "tokens", entry.folder, size, entry.unused, entry.dataset, (entry.folder,), whole=size, changed=changed
        )
        yield item.stays("is being written") if entry.made_now else item


def _scratch() -> Iterator[Item]:
    for folder in map(Path, scratch.left_over(node.SCRATCH)):
        size, changed = measured(folder)
        age = (time.time() - changed) / DAY
        yield Item("scratch", folder, size, age, "a killed run's own folder", (folder,), whole=size, changed=changed)


def _stages(runs: list[Path]) -> list[Path]:
    """The folders on a node's disk to which the plans of these runs copy images."""
    found: set[str] = set()
    for run in runs:
        with suppress(OSError, DrayError):
            stage = (read_json(last_attempt(run).plan, []) or {}).get("stage")
            if isinstance(stage, str) and stage.startswith("/"):
                found.add(str(Path(stage).parent))
    return [Path(folder) for folder in sorted(found)]
