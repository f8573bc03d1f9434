"""How long checkpoints took: in earlier runs, for the next plan; in this run, to check its grace."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dray.contract import exit_codes
from dray.planning import grace
from dray.planning.schema import Plan
from dray.runs.result import Result, read
from dray.runs.stop import TIME_LIMIT, Stop
from dray.runs.store import RunPaths, attempts

_RUNS = 8  # the newest ones


def earlier(runs: Path, name: str) -> list[str]:
    """The runs of this recipe, newest first."""
    pattern = re.compile(rf"\d{{8}}-\d{{6}}-{re.escape(name)}-(\d+|[0-9a-f]{{6}})")
    with suppress(OSError):
        return sorted((path.name for path in runs.iterdir() if pattern.fullmatch(path.name)), reverse=True)
    return []


def slowest(runs: Path, names: Sequence[str]) -> tuple[float, str] | None:
    """Seconds of the slowest checkpoint, and the run's name, from the first of these runs that recorded it."""
    for run in (runs / one for one in names[:_RUNS]):
        with suppress(OSError):
            if run.lstat().st_uid == os.geteuid() and (seconds := _of(run)) is not None:
                return seconds, run.name
    return None


def _of(run: Path) -> float | None:
    """Seconds of the run's slowest checkpoint, from the results of its attempts."""
    found = []
    for number in attempts(run):
        with suppress(OSError, ValueError):
            result = read(RunPaths(run, number).result)
            found += [result.save_s] if result.save_s is not None else []
    return max(found, default=None)


def given(stopped: Stop | None, plan: Plan | None) -> int | None:
    """The grace that the job had; the plan's if the job was not asked to end."""
    if stopped and stopped.left_s is not None:
        return stopped.left_s
    return plan.grace_s if plan and plan.by_slurm else None


def warning(result: Result, stopped: Stop | None) -> str | None:
    """A warning if the grace was too short, or is shorter than twice the slowest checkpoint."""
    given, save = result.grace_s, result.save_s
    if given is None or result.command:
        return None
    told = stopped is not None and stopped.left_s is not None
    late = told and result.reason == TIME_LIMIT and result.exit_code != exit_codes.RETRY
    if not late and (save is None or given >= grace.wanted(save)):
        return None
    took = f"the slowest checkpoint took {save:.1f} s" if save is not None else "no checkpoint was completed"
    enough = max(grace.wanted(save or 0), 2 * round(given) if late else 0)
    fix = f"set grace_s={enough} with dray submit, or --signal=B:USR1@{enough} with sbatch"
    if late:
        return f"the grace of {given:.0f} s before the time limit was too short: {took}; {fix}"
    return f"the grace of {given:.0f} s is shorter than twice the slowest checkpoint: {took}; {fix}"
