"""The run folder. This class owns every file name in it on the host side; plan.json tells the image's side."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from dray.contract.findings import ConfigError


class RunPaths:
    """One run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = folder / "plan.json"
        self.node_script = folder / "node.sh"
        self.srun_options = folder / "srun.options"
        self.facts = folder / "facts.txt"
        self.logs = folder / "logs"
        self.failures = folder / "failures"
        self.preflight = folder / "preflight"
        self.metrics = folder / "metrics.jsonl"
        self.checkpoints = folder / "checkpoints"
        self.result = folder / "result.json"

    def node_log(self, node: int) -> Path:
        """What the launcher on this node said."""
        return self.logs / f"node-{node}.log"

    @property
    def of_one_attempt(self) -> tuple[Path, ...]:
        """What a next attempt must not mistake for its own; checkpoints are for it to use."""
        return (
            self.plan,
            self.node_script,
            self.srun_options,
            self.facts,
            self.logs,
            self.failures,
            self.preflight,
            self.metrics,
            self.result,
        )


def new_id(name: str, *, job: int = 0, now: float | None = None) -> str:
    """Sorts by time; never given twice: a job's number is its cluster's own, and without one chance decides."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{name}-{job or secrets.token_hex(3)}"


class TakenError(ConfigError):
    """A run of this name is there already."""


def create(runs: Path, run: str) -> RunPaths:
    """Make the folder. It must be new: a run never writes into another's."""
    paths = RunPaths(runs / run)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        paths.folder.mkdir()
        for inner in (paths.logs, paths.failures, paths.checkpoints):
            inner.mkdir()
    except OSError as error:
        if isinstance(error, FileExistsError) and paths.folder.is_dir():
            raise TakenError(
                "there is a run of this name already", where=paths.folder, fix="name another: --run"
            ) from error
        raise ConfigError(
            "the run folder cannot be made",
            where=runs,
            wanted="a new folder that this user may write, on a disk that all nodes share",
            found=error.strerror or error,
            fix="set DRAY_RUNS to such a place, or give --runs",
        ) from error
    return paths


def reopen(runs: Path, run: str) -> RunPaths:
    """The folder that `dray submit` made. What an attempt before a requeue left in it goes aside."""
    paths = RunPaths(runs / run)
    if paths.plan.exists():
        aside = paths.folder / "attempts" / str(len(list(paths.folder.glob("attempts/*"))) + 1)
        aside.mkdir(parents=True)
        for left in paths.of_one_attempt:
            if left.exists():
                left.rename(aside / left.name)
        paths.logs.mkdir()
        paths.failures.mkdir()
    return paths


def default_runs() -> Path:
    """Where run folders go: DRAY_RUNS, else `runs` in the folder we stand in."""
    return Path(os.environ.get("DRAY_RUNS") or "runs").absolute()


def existing(folder: Path) -> RunPaths:
    """A run folder that is there."""
    paths = RunPaths(folder.absolute())
    if not paths.plan.is_file():
        raise ConfigError(
            "this is not a run folder",
            where=folder,
            wanted="a folder with plan.json in it",
            found="a folder without" if folder.is_dir() else "a file" if folder.exists() else "nothing there",
            fix="name the `run folder:` of the run's last line; one that waits in a queue has no plan yet",
        )
    return paths
