"""Hand a run to Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dray import process
from dray.errors import DrayError
from dray.runs.paths import create


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run's folder, and the command that queues it."""

    folder: Path
    site: str
    argv: list[str]


def sbatch(*, folder: Path, script: Path, options: Sequence[str], recipe: Path, overrides: Sequence[str]) -> list[str]:
    """The whole command; a later option of sbatch wins over an earlier one."""
    log = str(folder / "job-%j.log")
    return ["sbatch", "--parsable", f"--output={log}", *options, str(script), str(recipe), *overrides]


def submit(job: Job) -> str:
    """Make the run folder, queue the job and return its number. A refused job leaves no folder."""
    paths = create(job.folder.parent, job.folder.name)
    try:
        # By the environment and not by --export, where a comma in the path would end it.
        done = process.run(job.argv, env={"DRAY_RUN": str(job.folder), "DRAY_SITE": job.site})
    except DrayError:
        for inner in (paths.logs, paths.failures, paths.checkpoints, paths.folder):
            inner.rmdir()
        raise
    return done.out.strip().split(";")[0]
