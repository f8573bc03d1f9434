"""Goes: its names are in runs/store.py."""

from __future__ import annotations

from pathlib import Path

from dray.runs import store
from dray.runs.store import Run

Queued = store.Queued


def read(run: Path) -> Queued | None:
    """The submitted job of a run."""
    return Run(run).job
