"""Submit runs to Slurm: one as a job of its own, several as the tasks of a job array."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dray import process
from dray.config import dray_home, sites
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import files, run_folder
from dray.contract.control_characters import control_characters
from dray.contract.findings import ConfigError, DrayError, Finding, counted, error, listed, nearest
from dray.facts import Facts
from dray.fitness import network_and_site
from dray.images import store
from dray.planning import image
from dray.planning.schema import Plan
from dray.runs import capsule, local, prepare, slurm, status
from dray.runs.store import Queued, RunPaths, is_run, make_run_folder

_EXPEDITE = "enable_expedited_requeue"
_SIZE = ("--nodes=", "--gpus-per-node=", "--gres=gpu")
WAIT = ("-W", "--wait")
_DECIDED = ("-N", "--nodes", "-G", "--gpus", "--gres=gpu", "-n", "--ntasks")  # options of sbatch


@dataclass(frozen=True)
class Submission:
    """A run to submit; for 0, empty or None the recipe or the site decides."""

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
    own: Sequence[str] = ()
    """In a study: the settings of this run alone."""


@dataclass(frozen=True)
class Job:
    """A planned run, ready to submit."""

    plan: Plan
    options: list[str]
    """Options of sbatch."""
    arguments: list[str]
    """What the batch script gets beside the run and its own settings."""
    submission: Submission

    @property
    def argv(self) -> list[str]:
        """The sbatch command of this run alone."""
        run = self.plan.run_folder
        return self._sbatch([f"--output={_escaped(run)}/job-%j.log"], [f"--run={run}"], self.submission.own)

    def array(self, study: Path, tasks: str = "") -> list[str]:
        """The sbatch command of a job array for all runs that have the same one; `tasks` are their numbers."""
        options = [f"--output={_escaped(str(study))}-%a/job-%A_%a.log", f"--array={tasks}"]
        return self._sbatch(options, [f"--tasks={study / run_folder.TASKS}"], [])

    def _sbatch(self, options: Sequence[str], runs: Sequence[str], settings: Sequence[str]) -> list[str]:
        name = "multinode.sh" if len(self.plan.world.nodes) > 1 else "singlenode.sh"
        script = str(dray_home.root() / "slurm" / name)
        command = ["--", *self.submission.command] if self.submission.command else []
        arguments = [*runs, *self.arguments, *settings, *command]
        return ["sbatch", "--parsable", *options, *self.options, script, *arguments]


def _escaped(folder: str) -> str:
    """The folder in an option of sbatch, where %j is the job."""
    return folder.replace("%", "%%")


def planned(recipe: Recipe, attempt: RunPaths, submission: Submission, known: Known | None = None) -> Job:
    """The attempt's plan, and the command that submits it. ConfigError if the plan is refused."""
    facts, choice = job_facts(
        recipe, submission.nodes, submission.gpus, submission.site, ranks=submission.ranks or None,
        options=(*(submission.before or ()), *submission.options), gpu_memory=submission.gpu_memory, known=known,
    )  # fmt: skip
    plan = prepare.decide(recipe, facts, choice, attempt)
    plan.refuse()
    defaults = options(recipe, choice.site, facts.gpus_per_node, submission.nodes)
    if recipe.requeue == "expedite":
        note = normal_requeue(known.conf if known else slurm.conf())
        if note:
            plan = plan.model_copy(update={"findings": (*plan.findings, note)})
        else:
            defaults.append("--requeue=expedite")
    if submission.before is not None:
        defaults = [*submission.before, *(option for option in defaults if option.startswith(_SIZE))]
    image = store.job_file(dray_home.root(), plan.recipe.image_name, plan.engine)
    # Some sites export no environment to jobs.
    site = "" if choice.site.name == sites.GENERIC else sites.portable(choice.site.name)
    arguments = [f"--image={image}", f"--site={submission.site or site}"]
    if submission.gpu_memory is not None:
        arguments.append(f"--gpu-memory={submission.gpu_memory:g}")
    job = Job(plan, [*defaults, *submission.options], [*arguments, *submission.arguments], submission)
    typed = [plan.run_folder, *job.options, *job.arguments, *submission.own]
    for finding in control_characters({"the command line": typed}):
        raise error(finding)
    return job


def check(options: Sequence[str]) -> None:
    """Refuse options of sbatch that the plan must know, or that are malformed."""
    for option in options:
        if option in WAIT:
            raise ConfigError(
                "sbatch --wait would end with the job, which dray could not record before", found=f"--sbatch {option}",
                fix="use dray submit --follow, which shows the run until it has ended",
            )  # fmt: skip
        if option.startswith(("-a", "--ar")):
            raise ConfigError(
                "--array would put all tasks into one run", found=f"--sbatch {option}",
                fix="use dray study sweep RECIPE key=a,b, which submits an array with one run per task",
            )  # fmt: skip
        if option.startswith(_DECIDED):
            raise ConfigError(
                "dray must plan with this option, so it cannot be given by --sbatch",
                found=f"--sbatch {option}",
                fix="give --nodes and --gpus-per-node to dray submit itself; if the cluster needs --gres=gpu:N, set "
                'gpu_option = "gres" in the site file (docs/launch.md)',
            )
        if " " in option and "=" not in option.partition(" ")[0]:
            raise ConfigError(
                "an option of sbatch must be one word", found=f"--sbatch={option!r}", fix="--sbatch=--time=08:00:00"
            )


def options(recipe: Recipe, site: Site, gpus: int, nodes: int | None) -> list[str]:
    """The options that `dray submit` adds to sbatch; the user's options come later and win."""
    found = [f"--job-name={recipe.name}", f"--nodes={(nodes or recipe.nodes) + recipe.spares}", "--ntasks-per-node=1"]
    found += site.sbatch
    if grace := recipe.grace_s or site.grace_s:
        found.append(f"--signal=B:USR1@{grace}")
    if gpus:
        found.append(f"--gres=gpu:{gpus}" if site.gpu_option == "gres" else f"--gpus-per-node={gpus}")
    if recipe.replaces_nodes:
        found.append("--no-kill")
    return found


def normal_requeue(config: Mapping[str, str]) -> Finding | None:
    """Why Slurm with this slurm.conf does not take --requeue=expedite; None if it does."""
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    is_new = version and (int(version[1]), int(version[2])) >= (25, 11)
    parameters = config.get("SlurmctldParameters", "")
    if is_new and _EXPEDITE in parameters.split(","):
        return None
    return Finding(
        "this Slurm does not support requeue = expedite; a requeued job waits two minutes", kind="note",
        wanted=f"Slurm 25.11 or later, with SlurmctldParameters={_EXPEDITE}",
        found=f"Slurm {config.get('SLURM_VERSION', '')}, SlurmctldParameters={parameters}",
    )  # fmt: skip


def require_free(run: Path, options: Sequence[str]) -> None:
    """Refuse a second job for an active run, unless it waits for the first (`--dependency`)."""
    if not is_run(run) or any(option.startswith(("--dependency", "-d")) for option in options):
        return
    state = status.status(run)
    # A job that Slurm here does not know may be on another cluster with the same disk.
    without_slurm = state.kind == "unknown" and state.paths and not state.job_id
    if state.kind == "ended" or without_slurm:
        return
    after = f"; or wait for it: --sbatch=--dependency=afterany:{state.slurm_job.id}" if state.slurm_job else ""
    raise ConfigError(
        f"the run {'may be' if state.kind == 'unknown' else 'is'} active: two jobs would write into its folder",
        where=run, wanted="a run that has ended", found=state.where, fix=f"dray stop {shlex.quote(str(run))}{after}",
    )  # fmt: skip


def submit(
    argv: Sequence[str], folder: Path, share: str, code: Path, beside: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Submit one run, and return its job's number. Files `beside` are in the run folder before the job begins.

    The capsule records the `code` in that folder.
    """
    return enqueue(argv, {folder: None}, share, code, beside)[0].job


def enqueue(
    argv: Sequence[str], runs: Mapping[Path, int | None], share: str, code: Path,
    beside: Mapping[str, str] = MappingProxyType({}),
) -> list[Queued]:  # fmt: skip
    """Make the run folders, each with its number in a job array, and submit. If sbatch refuses, remove new folders."""
    new = list[Path]()
    found_code = capsule.find_source(code)
    try:
        for run in runs:
            is_new = not run.exists()
            make_run_folder(run, new=is_new, share=share)
            if is_new:
                new.append(run)
            for name, text in beside.items():
                files.write_atomic(run / name, text)
        job = slurm.sbatch(argv)
    except slurm.NoJobNumberError as unknown:
        unknown.amend(where=sbatch_command(argv))
        raise
    except (DrayError, OSError) as refused:
        for run in filter(Path.is_dir, new):
            for name in beside:
                (run / name).unlink(missing_ok=True)
            with suppress(OSError):  # sbatch may fail after the job has begun
                run.rmdir()
        if not isinstance(refused, DrayError):
            raise
        if not process.which(argv[0]):
            refused.amend(fix="submit on a login node of the cluster; without Slurm use dray run or make cluster")
        by_sbatch = refused.finding.where == " ".join(argv)
        refused = explain_refusal(refused, argv)
        if by_sbatch:  # and not by what is wrong with the run folder
            refused.amend(where=sbatch_command(argv))
        raise refused from None
    found = []
    for run, task in runs.items():
        queued = job.model_copy(update={"task": task})
        with suppress(OSError):  # the job is in the queue anyway
            files.write_atomic(run / run_folder.JOB, queued.model_dump_json(indent=1))
            if found_code:
                capsule.keep_source(run, found_code)
        found.append(queued)
    return found


# What the job will find ----------------------------------------------------------------------------------------------

ASSUMED = "assumed, because no node was probed: node names, GPUs, HF_HOME, job number 0, the site's engine or Apptainer"


class Known(NamedTuple):
    """Facts that all runs of a study share, asked once."""

    conf: Mapping[str, str]
    """Slurm's configuration, from scontrol."""
    choice: sites.Choice


def known_here(site: str) -> Known:
    """The facts of this login node."""
    return Known(slurm.conf(), network_and_site.site(site))


def job_facts(
    recipe: Recipe,
    nodes: int | None,
    gpus: int,
    site: str,
    *,
    ranks: int | None,
    options: Sequence[str],
    gpu_memory: float | None,
    known: Known | None = None,
) -> tuple[Facts, sites.Choice]:
    """The facts that this login node can know, and the site."""
    conf = known.conf if known else slurm.conf()
    file = os.environ.get("DRAY_IMAGE", "")
    here = local.facts(recipe, engine="apptainer", image=file or "none", nodes=nodes, gpus_per_node=gpus, site=site)
    told = {
        "scheduler": "slurm",
        "address": None,
        "home": "",
        "image_given": bool(file),
        "image_variant": store.variant(Path(file)) if file else "",
        "cluster": slurm.cluster_name(conf),
        "login": socket.gethostname(),
        "options": tuple(options),
        "gpu_memory_gb": gpu_memory,
    }
    seen, choice = prepare.at_site(here.model_copy(update=told), known.choice if known else None)
    variant = image.variant(recipe, choice.site, seen).value
    engine, name = choice.site.engine or "apptainer", recipe.adopted or variant
    job_image = store.job_file(dray_home.root(), name, engine)
    store.require_adopted(dray_home.root(), name, job_image)
    sbatch = (*choice.site.sbatch, *options)
    partition = _last_value(sbatch, "--partition=|-p") or os.environ.get("SBATCH_PARTITION", "")
    found = {
        "image": str(job_image),
        "image_variant": store.variant(job_image),
        **store.described(job_image),
        "gpus_per_node": gpus or (0 if variant == "cpu" else ranks or choice.site.gpus_per_node),
        "engine": engine,
        "account": _last_value(sbatch, "--account=|-A") or os.environ.get("SBATCH_ACCOUNT", ""),
        **slurm.preemption(conf, partition.replace(",", " ").split()),
    }
    return seen.model_copy(update=found), choice


def _last_value(options: Sequence[str], names: str) -> str:
    """The last value of an option of sbatch, by its long and its short name; empty without one."""
    values = [found[1] for option in options if (found := re.fullmatch(f"(?:{names})(.+)", option))]
    return values[-1] if values else ""


# What sbatch refuses -------------------------------------------------------------------------------------------------

_REFUSED_NAMES = {  # sbatch's message, and the option that it is about
    "Invalid partition name": ("partition", "p"),
    "No partition specified": ("partition", "p"),
    "Invalid account": ("account", "A"),
    "Invalid qos": ("qos", "q"),
    "Invalid feature": ("constraint", "C"),
}
_SHOWN = 6  # partitions
_SIZE_OPTIONS = ("--partition", "-p", "--nodes", "-N", "--gpus-per-node", "--gres", "--cpus-per-task", "--mem")
_REFUSED_SIZE = re.compile(
    "Requested node configuration is not available|Node count specification invalid|Invalid generic resource"
    "|More processors requested than permitted|Requested partition configuration not available"
)


def explain_refusal(refused: DrayError, argv: Sequence[str]) -> DrayError:
    """sbatch's refusal with the valid values and the nearest one; unchanged if Slurm tells no more."""
    message = refused.finding.found
    for text, (option, letter) in _REFUSED_NAMES.items():
        if text in message:
            if option == "partition":
                known = [*dict.fromkeys(partition.name for partition in _partitions())]
            else:
                known = slurm.offered(option)
            return _refused_name(message, option, _given(argv, option, letter), known)
    if _REFUSED_SIZE.search(message):
        return _refused_size(message, argv)
    if "Requested time limit is invalid" in message:
        return ConfigError(
            "Slurm refuses this --time",
            wanted="\n".join(f"{name}: at most {limit}" for name, limit in slurm.limits().items()),
            found=message,
            fix="use --sbatch=--time=HH:MM:SS within the partition's limit",
        )
    return refused


def sbatch_command(argv: Sequence[str]) -> str:
    """The sbatch command to type again, with the variables that have options for it."""
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("SBATCH_")]
    return shlex.join(["env", *given, *argv] if given else argv)


def _partitions() -> list[slurm.Partition]:
    with suppress(DrayError):  # sbatch's refusal is what the user must see
        return slurm.partitions()
    return []


def _sbatch_words(argv: Sequence[str]) -> list[str]:
    """sbatch's own options, without those of the script."""
    return [*takewhile(lambda word: not word.endswith(".sh"), argv)]


def _given(argv: Sequence[str], option: str, letter: str) -> str:
    """The last value of an option on sbatch's command line, or in its environment."""
    values = re.findall(rf" (?:--{option}[= ]|-{letter} ?)(\S+)", " ".join(_sbatch_words(argv)))
    return values[-1] if values else os.environ.get(f"SBATCH_{option.upper()}", "")


def _refused_name(message: str, option: str, given: str, known: list[str]) -> ConfigError:
    near = nearest(given, known) or next(iter(known), option.upper())
    return ConfigError(
        f"Slurm refuses this {option}" if given else f"Slurm needs --{option}",
        wanted=f"one of {listed(known)}" if known else f"a value of --{option} on this cluster",
        found=f"--{option}={given}\n{message}" if given else message,
        fix=f"--sbatch=--{option}={near}",
    )


def _refused_size(message: str, argv: Sequence[str]) -> ConfigError:
    """Explain the refusal of nodes and GPUs that the partition does not have."""
    rows = [
        f"{partition.name}: {counted(partition.nodes, 'node')} with {counted(partition.cpus, 'CPU')}, "
        f"{counted(partition.gpus, 'GPU')}"
        for partition in _partitions()[:_SHOWN]
    ]
    return ConfigError(
        "no nodes of the partition match what this job requests",
        wanted="\n".join(rows),
        found=f"{' '.join(word for word in _sbatch_words(argv) if word.startswith(_SIZE_OPTIONS))}\n{message}",
        fix="another --sbatch=--partition=NAME; or less: --nodes, --gpus-per-node, --sbatch=--cpus-per-task=N or "
        "--sbatch=--mem=SIZE",
    )
