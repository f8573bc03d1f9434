"""Goes: its names are in runs/store.py."""

from __future__ import annotations

from pathlib import Path

from dray.runs.store import *  # noqa: F403
from dray.runs.store import Run, RunPaths, _number, newest_attempt


def attempt_at(folder: Path) -> RunPaths:
    number = _number(folder.absolute().name)
    return RunPaths(folder.absolute().parent, number) if number else newest_attempt(folder)


def first_attempt(run: Path) -> RunPaths | None:
    return next((one.paths for one in Run(run).attempts if one.paths.plan.is_file()), None)
