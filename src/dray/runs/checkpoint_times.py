"""How long checkpoints took in earlier runs, for the next plan."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dray.runs.metrics import number
from dray.runs.store import Run

_RUNS = 8  # the newest ones


def earlier(runs: Path, name: str) -> list[str]:
    """The runs of this recipe, newest first."""
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(name)}-(\d+|[0-9a-f]{{6}})")
    with suppress(OSError):
        return sorted(filter(pattern.fullmatch, os.listdir(runs)), reverse=True)  # noqa: PTH208
    return []


def slowest(runs: Path, names: Sequence[str]) -> tuple[float, str] | None:
    """Seconds of the slowest checkpoint, and the run's name, from the first of these runs that recorded it."""
    for name in names[:_RUNS]:
        with suppress(OSError):
            run = Run(runs / name)
            saves = [number(attempt.result, "save_s") or 0.0 for attempt in run.attempts]
            if any(saves) and run.owner == os.geteuid():
                return max(saves), name
    return None
