"""Hand a run to Slurm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dray import process
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract.findings import ConfigError, DrayError
from dray.runs.paths import make_run_folder


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


def options(recipe: Recipe, site: Site, gpus: int) -> list[str]:
    """What `dray submit` adds to sbatch; a later option of the user's wins over these."""
    asked = {"gpus-per-node": f"--gpus-per-node={gpus}", "gres": f"--gres=gpu:{gpus}"}
    options = [f"--job-name={recipe.name}", f"--nodes={recipe.nodes}", "--ntasks-per-node=1", *site.sbatch]
    return [*options, asked[site.gpu_option]] if gpus else options


def require_account(site: Site, options: Sequence[str]) -> None:
    """Where a cluster wants to know who pays, it refuses the job in words of its own, or lets it wait for ever."""
    given = [*site.sbatch, *options]
    if not site.account or any(option.startswith(("-A", "--account")) for option in given):
        return
    if not os.environ.get("SBATCH_ACCOUNT"):
        raise ConfigError(
            "this cluster wants to know which project pays",
            where=f"site {site.name}",
            wanted=f"an account such as {site.account}",
            found="no --account, and SBATCH_ACCOUNT is not set",
            fix=f"dray submit --sbatch --account={site.account}, or export SBATCH_ACCOUNT",
        )


def submit(argv: Sequence[str], folder: Path) -> str:
    """Make the run folder, queue the job and return its number. A refused job leaves no folder."""
    make_run_folder(folder)
    try:
        done = process.run(argv)
    except DrayError:
        folder.rmdir()
        raise
    return done.out.strip().split(";")[0]
