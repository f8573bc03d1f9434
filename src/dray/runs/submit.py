"""Submit a run to Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dray import process
from dray.config import dray_home, sites
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import files, run_folder
from dray.contract.control_characters import control_characters
from dray.contract.findings import ConfigError, DrayError, Finding, error
from dray.images import store
from dray.planning.schema import Plan
from dray.runs import login, refusal, slurm, source, status, write
from dray.runs.store import Queued, RunPaths, is_run, make_run_folder

_SIZE = ("--nodes=", "--gpus-per-node=", "--gres=gpu")
_EXPEDITE = "enable_expedited_requeue"


class Asked(NamedTuple):
    """The request for a job; for 0, empty or None the recipe or the site decides."""

    arguments: Sequence[str]
    """The recipe and its settings, as the job reads them."""
    command: Sequence[str] = ()
    nodes: int | None = None
    ranks: int = 0
    """Ranks per node."""
    gpus: int = 0
    """GPUs per node."""
    site: str = ""
    gpu_memory: float | None = None
    options: Sequence[str] = ()
    """Options of sbatch, which win over dray's own."""
    before: Sequence[str] | None = None
    """Options of an earlier job, instead of dray's own except the size."""


class Job(NamedTuple):
    """A planned run, ready to submit."""

    plan: Plan
    argv: list[str]
    """The sbatch command."""


def planned(recipe: Recipe, attempt: RunPaths, asked: Asked, known: login.Known | None = None) -> Job:
    """The attempt's plan, and the command that submits it. ConfigError if the plan is refused."""
    facts, choice = login.facts(
        recipe, asked.nodes, asked.gpus, asked.site, ranks=asked.ranks or None,
        options=(*(asked.before or ()), *asked.options), gpu_memory=asked.gpu_memory, known=known,
    )  # fmt: skip
    plan = write.decide(recipe, facts, choice, attempt)
    plan.refuse()
    own = options(recipe, choice.site, facts.gpus_per_node, asked.nodes)
    if recipe.requeue == "expedite":
        if why := normal_requeue(known.conf if known else slurm.conf()):
            plan = plan.model_copy(update={"findings": (*plan.findings, why)})
        else:
            own.append("--requeue=expedite")
    if asked.before is not None:
        own = [*asked.before, *(one for one in own if one.startswith(_SIZE))]
    argv = sbatch(
        plan,
        options=[*own, *asked.options],
        image=store.job_file(dray_home.root(), plan.recipe.image_name, plan.engine),
        site=asked.site or site_word(choice.site),
        gpu_memory=asked.gpu_memory,
        recipe=asked.arguments,
        command=asked.command,
    )
    return Job(plan, argv)


def check(options: Sequence[str]) -> None:
    """Refuse options of sbatch that the plan must know, or that are malformed."""
    for option in options:
        if option.startswith(("-a", "--ar")):
            raise ConfigError(
                "--array would put all tasks into one run", found=f"--sbatch {option}",
                fix="use dray sweep RECIPE key=a,b, which submits an array with one run per task",
            )  # fmt: skip
        if option.startswith(("-N", "--nodes", "-G", "--gpus", "--gres=gpu", "-n", "--ntasks")):
            raise ConfigError(
                "dray must plan with this option, so it cannot be given by --sbatch",
                found=f"--sbatch {option}",
                fix="give --nodes and --gpus-per-node to dray submit itself; if the cluster needs --gres=gpu:N, set "
                'gpu_option = "gres" in the site file (docs/launch.md)',
            )
        if " " in option and not option.partition(" ")[0].count("="):
            raise ConfigError(
                "an option of sbatch must be one word", found=f"--sbatch={option!r}", fix="--sbatch=--time=08:00:00"
            )


def options(recipe: Recipe, site: Site, gpus: int, nodes: int | None) -> list[str]:
    """The options that `dray submit` adds to sbatch; the user's options come later and win."""
    asked = {"gpus-per-node": f"--gpus-per-node={gpus}", "gres": f"--gres=gpu:{gpus}"}
    return [
        f"--job-name={recipe.name}",
        f"--nodes={recipe.nodes + recipe.spares}",
        "--ntasks-per-node=1",
        *site.sbatch,
        *([f"--signal=B:USR1@{grace}"] if (grace := recipe.grace_s or site.grace_s) else []),
        *([asked[site.gpu_option]] if gpus else []),
        *([f"--nodes={nodes + recipe.spares}"] if nodes else []),
        *(["--no-kill"] if recipe.replaces_nodes else []),
    ]


def normal_requeue(config: Mapping[str, str]) -> Finding | None:
    """Why Slurm with this slurm.conf does not take --requeue=expedite; None if it does."""
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    if version is None:
        missing = "an answer of scontrol show config"
    elif (int(version[1]), int(version[2])) < (25, 11):
        missing = f"Slurm 25.11 or later, and this is {version[0]}"
    elif _EXPEDITE not in config.get("SlurmctldParameters", "").split(","):
        missing = f"SlurmctldParameters={_EXPEDITE} in slurm.conf"
    else:
        return None
    return Finding(f"requeue = expedite needs {missing}; a requeued job waits two minutes", kind="note")


def site_word(site: Site) -> str:
    """The site's name for the job's command line; some sites export no environment to jobs."""
    return "" if site.name == sites.GENERIC else sites.portable(site.name)


def sbatch(
    plan: Plan,
    *,
    options: Sequence[str],
    image: Path,
    site: str,
    gpu_memory: float | None,
    recipe: Sequence[str],
    command: Sequence[str],
) -> list[str]:
    """The whole sbatch command, with what was decided on the login node."""
    script = dray_home.root() / "slurm" / ("multinode.sh" if len(plan.world.nodes) > 1 else "singlenode.sh")
    log = plan.run_folder.replace("%", "%%") + "/job-%j.log"
    decided = [f"--run={plan.run_folder}", f"--image={image}", f"--site={site}"]
    decided += [f"--gpu-memory={gpu_memory:g}"] if gpu_memory is not None else []
    argv = ["sbatch", "--parsable", f"--output={log}", *options, str(script), *decided, *recipe]
    for finding in control_characters({"the command line": argv}):
        raise error(finding)
    return [*argv, *(["--", *command] if command else [])]


def require_free(run: Path, options: Sequence[str]) -> None:
    """Refuse a second job for an active run, unless it waits for the first (`--dependency`)."""
    state = status.status(run) if is_run(run) else None
    # A job that Slurm here does not know may be on another cluster with the same disk.
    may_go_on = state and (state.kind != "unknown" or state.paths is None or status.status(run).job)
    if state and may_go_on and state.kind != "ended" and not any(map(_waits, options)):
        after = f"; or wait for it: --sbatch=--dependency=afterany:{state.slurm_job.id}" if state.slurm_job else ""
        raise ConfigError(
            f"the run {'may be' if state.kind == 'unknown' else 'is'} active: two jobs would write into its folder",
            where=run,
            wanted="a run that has ended",
            found=state.where,
            fix=f"dray stop {shlex.quote(str(run))}{after}",
        )


def _waits(option: str) -> bool:
    return option.startswith(("--dependency", "-d"))


def submit(
    argv: Sequence[str], folder: Path, share: str, code: Path, beside: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Make the run folder if needed, submit the job, and return its number. If sbatch refuses, a new folder is removed.

    The capsule records the `code` in that folder. Files `beside` are in the run folder before the job begins.
    """
    seen = source.look(code)
    new = not folder.exists()
    make_run_folder(folder, new=new, share=share)
    try:
        for name, text in beside.items():
            files.write_atomic(folder / name, text)
        queued = slurm.sbatch(argv)
    except (DrayError, OSError) as refused:
        if new:
            for name in beside:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        if isinstance(refused, DrayError) and not process.which(argv[0]):
            refused.amend(fix="submit on a login node of the cluster; without Slurm use dray run or make cluster")
        if isinstance(refused, DrayError):
            raise refusal.explained(refused, argv) from None
        raise
    record(folder, queued, seen)
    return queued.job


def record(run: Path, queued: Queued, code: tuple[source.Source, str] | None) -> None:
    """Write the submitted job and the state of its code into the run folder."""
    with suppress(OSError):  # the job is in the queue anyway
        files.write_atomic(run / run_folder.JOB, queued.model_dump_json(indent=1))
        if code:
            source.keep(run, code)
