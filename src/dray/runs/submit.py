"""Hand a run to Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dray import process
from dray.errors import DrayError
from dray.runs.paths import create


def sbatch(
    *,
    script: Path,
    options: Sequence[str],
    folder: Path,
    image: Path,
    site: str,
    words: Sequence[str],
    command: Sequence[str],
) -> list[str]:
    """The whole command. What was decided here goes along as words: some sites export no environment to jobs."""
    log = str(folder).replace("%", "%%") + "/job-%j.log"
    decided = [f"--run={folder}", f"--image={image}", f"--site={site}"]
    said = [*words, *(["--", *command] if command else [])]
    return ["sbatch", "--parsable", f"--output={log}", *options, str(script), *decided, *said]


def submit(argv: Sequence[str], folder: Path) -> str:
    """Make the run folder, queue the job and return its number. A refused job leaves no folder."""
    paths = create(folder.parent, folder.name)
    try:
        done = process.run(argv)
    except DrayError:
        for inner in (paths.logs, paths.failures, paths.checkpoints, paths.folder):
            inner.rmdir()
        raise
    return done.out.strip().split(";")[0]
