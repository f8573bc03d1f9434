"""Submit a replay of a Slurm run with its job's options, and wait for its end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dray.config import dray_home
from dray.config.recipe import Recipe
from dray.contract import files, run_folder
from dray.contract.findings import ConfigError, DrayError
from dray.images import store
from dray.planning.schema import Plan
from dray.runs import status
from dray.runs import submit as queue
from dray.runs.diff import ABSENT, Difference
from dray.runs.replay import as_files
from dray.runs.result import Result, result_of
from dray.runs.store import Run, RunPaths, attempts, new_id

_STEM = "replay"
_SCRIPTS = ("multinode.sh", "singlenode.sh")
# Options that the replay sets itself, that concern other jobs or another time, or that hide the job's number.
_OWN = (
    "--parsable", "--output", "--nodes", "--gpus-per-node", "--dependency", "--no-kill", "--begin", "--deadline",
    "--array", "--wait", "--hold", "--test-only", "--quiet",
)  # fmt: skip
_SHORT = ("-o", "-N", "-d", "-k", "-b", "-a", "-W", "-H", "-Q")
# Facts about nodes that are known before Slurm has chosen them.
_NODES = ("nodes", "site", "started by", "world.size", "world.ranks_per_node")
_LOOK_S, _ASK_S = 1.0, 15.0


class Asked(NamedTuple):
    """The options of the run's own job."""

    options: tuple[str, ...] = ()
    """Options of sbatch, without those for that job alone."""
    site: str = ""
    gpu_memory: float | None = None


class Job(NamedTuple):
    """A replay that can be submitted."""

    argv: list[str]
    folder: Path
    plan: Plan
    recipe: Recipe


def asked(run: Path) -> Asked | None:
    """The options from the run's job.json. None if it is missing, as after a plain sbatch, or if others may have
    written it: options of sbatch name files that the job would overwrite."""
    file = run / run_folder.JOB
    with suppress(OSError, ValueError):
        submitted = Run(run).job if files.is_own(run) and files.is_own(file) else None
        if submitted is None:
            return None
        argv = submitted.argv
        script = [Path(word).name in _SCRIPTS for word in argv].index(True)
        decided = dict[str, str]()
        for word in argv[script + 1 :]:
            if not word.startswith("--") or word == "--":
                break
            name, _, decided[name] = word.partition("=")
        memory = decided.get("--gpu-memory")
        return Asked(tuple(_kept(argv[1:script])), decided.get("--site", ""), float(memory) if memory else None)
    return None


def _kept(options: Sequence[str]) -> Iterator[str]:
    dropped = False
    for option in options:
        if option.startswith("-") or not dropped:  # else the value of a dropped option
            name = option.partition("=")[0]
            # sbatch takes the beginning of a name, too.
            long = len(name) > len("--") and any(own.startswith(name) for own in _OWN)
            dropped = long if name.startswith("--") else option.startswith(_SHORT)
            dropped = dropped or option.startswith("--gres=gpu")
            if not dropped:
                yield option


def job(recipe: Recipe, before: Plan, made: Asked | None, runs: Path, more: Sequence[str]) -> Job:
    """The replay with its sbatch command: GPUs as before, nodes from the recipe; options in `more` win."""
    queue.check(more)
    gpus = before.world.ranks_per_node if before.variant != "cpu" else 0
    old, folder = made or Asked(), runs / new_id(recipe.name)
    asked = queue.Asked(
        [str(folder / f"{_STEM}.toml")], gpus=gpus, site=old.site, gpu_memory=old.gpu_memory, options=more,
        before=made.options if made else None,
    )  # fmt: skip
    planned = queue.planned(recipe, RunPaths(folder), asked)
    plan = planned.plan
    store.required(dray_home.root(), plan.recipe.image_name, recipe.image_digest, plan.engine)
    return Job(planned.argv, folder, plan, recipe)


def start(made: Job) -> int:
    """Submit the replay, with its recipe in its folder; the job's number."""
    code = Path(made.recipe.command.folder) if made.recipe.command else dray_home.root()
    return queue.submit(made.argv, made.folder, made.recipe.runs.share, code, as_files(made.recipe, _STEM))


def decided(found: Sequence[Difference]) -> list[Difference]:
    """The differences that are known before Slurm has chosen the nodes."""
    known = [one for one in found if (one.name, one.b) != ("image_sha256", ABSENT)]
    return [one for one in known if one.kind not in ("nodes", "transport") or one.name in _NODES]


def require_ended(run: Path) -> None:
    """Refuse to compare a replay that still waits or runs: some losses are missing."""
    if run.is_dir() and (state := status.status(run)).kind in ("queued", "starting", "running"):
        raise ConfigError(
            "the replay has not ended", where=run, wanted="a run that has ended", found=state.where,
            fix=f"wait for its end with dray top {shlex.quote(str(run))}, then run this again",
        )  # fmt: skip


def wait(run: Path, sleep: Callable[[float], None] = time.sleep) -> Result:
    """Wait until the run has ended, with all its attempts; its result. DrayError if it left none."""
    passed, gone = 0.0, False
    while True:
        found = _last(run)
        if found and not (found.next and found.next.requeue):
            return found
        if passed % _ASK_S == 0:  # Slurm serves many users
            ended = status.status(run).kind == "ended"
            if ended and gone:  # on a shared disk the result may appear after Slurm shows the job's end
                if found := _last(run):
                    return found
                raise DrayError(
                    "the replay ended without a result", where=run,
                    found="an attempt without a result" if attempts(run) else "no attempt: its job never started",
                    fix=f"dray why {shlex.quote(str(run))}" if attempts(run) else "see job-*.log in that folder",
                )  # fmt: skip
            gone = ended
        sleep(_LOOK_S)
        passed += _LOOK_S


def _last(run: Path) -> Result | None:
    numbers = attempts(run)
    return result_of(RunPaths(run, numbers[-1])) if numbers else None
