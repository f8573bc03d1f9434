"""Goes: its names are in runs/store.py."""

from __future__ import annotations

from pathlib import Path

from dray.runs.store import *  # noqa: F403
from dray.runs.store import Attempt, Run


def _attempt(folder: Path | str) -> Attempt:
    path = Path(folder)
    return Attempt(Run(path.parent), int(path.name.rpartition("-")[2]))


def job_of(attempt: Path | str) -> int:
    found = _attempt(attempt).facts.get("job", "")
    return int(found) if found.isdecimal() else 0


def id_of(attempt: Path | str) -> int | str:
    return _attempt(attempt).facts.get("task") or job_of(attempt)


def cluster_of(attempt: Path | str) -> str:
    return _attempt(attempt).facts.get("cluster", "")
