"""`dray replay`: repeat a run, and compare the losses."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from dray import process
from dray.cli import diff, status
from dray.cli.args import Run, Runs, Sbatch, refuse_or_warn
from dray.cli.recipe import write_new
from dray.cli.run import conduct
from dray.contract import exit_codes
from dray.planning.schema import Plan
from dray.runs import compare, local, prepare, submit
from dray.runs import replay as replays
from dray.runs.replay import Original
from dray.runs.status import LOST, Watched
from dray.runs.store import RunPaths, default_runs, find


def replay(
    run: Run = "",
    engine: str = "",
    recipe: Path | None = None,
    sbatch: Sbatch = None,
    runs: Runs = None,
) -> int:
    """Repeat a run with the same recipe, nodes and ranks, and compare the losses step by step.

    It lists what will differ. The exit code is 0 if all losses are equal to the last bit, else 1.
    A run of Slurm is submitted again, and the `dray diff` to type later is printed: the exit code is 0 then.
    With --sbatch=--wait it waits for the job, and compares here. Of another user's run, --recipe writes the recipe.

    --engine [bare|docker|podman]: Container engine on this machine. Default: the run's own.
    --recipe FILE: Write the run's recipe with all decided values; start nothing.

    dray replay 20261120-124439
    dray replay 4711 --recipe again.toml
    """
    before = replays.original(find(run, runs))
    if recipe:
        _save(recipe, before)
        return exit_codes.DONE
    replays.require_own(before)
    runs = (runs or default_runs()).absolute()
    if before.plan.by_slurm and not engine and process.which("sbatch"):
        return _submit(before, runs, sbatch or [])
    return _start(before, runs, replays.engine_here(before.plan, engine))


def _save(file: Path, before: Original) -> None:
    for name, text in replays.as_files(before.recipe, file.stem).items():
        write_new(file.with_name(name), text, "the recipe", fix="give another name")
    recipe = shlex.quote(str(file.with_suffix(".toml")))
    if found := replays.foreign(before):
        print(f"another user may have written this run ({found}): read {recipe} first, since it may run code")
    print(f"dray submit {recipe} --nodes {before.recipe.nodes}, and then: dray diff RUN NEW_RUN")


def _start(before: Original, runs: Path, engine: str) -> int:
    """Repeat the run on this machine."""
    recipe = before.recipe
    local.require(recipe)
    site = "" if before.plan.by_slurm else before.plan.site.removeprefix("site ")
    facts = local.facts(recipe, engine=engine, nodes=recipe.nodes, gpus_per_node=before.gpus, site=site)
    plan, paths = prepare.write(recipe, facts, runs=runs)
    _announce(before, paths, plan)
    return _compare(before, paths.run, conduct(plan, paths))


def _submit(before: Original, runs: Path, options: Sequence[str]) -> int:
    """Submit a job with the same nodes, ranks and options. With --wait, compare once it has ended: sbatch itself would
    not tell the job's number before."""
    kept = [option for option in options if option not in submit.WAIT]
    job = replays.job(before, runs, kept)
    refuse_or_warn(job.plan)
    folder = Path(job.plan.run_folder)
    _announce(before, RunPaths(folder), job.plan)
    print(shlex.join(job.argv), flush=True)
    print(f"job {replays.start(before, job)} is in the queue\nrun folder: {folder}")
    if kept == options:
        print(f"once it has ended: {shlex.join(['dray', 'diff', str(before.folder), str(folder)])}")
        return exit_codes.DONE
    watched = Watched(folder)
    while not watched.over(seen := watched.look()):
        time.sleep(watched.ask_s)
    if seen.state == LOST:  # a shared disk may show the result later than Slurm the job's end
        time.sleep(watched.next_s)
        seen = watched.look()
    print("\n".join(status.text(seen)))
    code = exit_codes.FAILED if seen.exit_code is None else seen.exit_code
    return _compare(before, folder, code) if seen.recipe else code  # without a plan nothing ran


def _announce(before: Original, paths: RunPaths, plan: Plan) -> None:
    """Print what will differ, as far as this machine can tell."""
    found = [*map(diff.line, before.differences(paths, plan))]
    head = "what cannot be the same, run -> replay:"
    if not found:
        head = "nothing differs from the run, as far as dray can tell before the start"
    print("\n".join([head, *found]), flush=True)


def _compare(before: Original, folder: Path, code: int) -> int:
    """Print what differs in the replay, which ended with this exit code, and whether the losses are the same."""
    found = compare.runs(before.folder, folder)
    print("\n".join(diff.text(found)))
    if code:
        print(f"the replay failed with exit code {code}: {shlex.join(['dray', 'why', str(folder)])}")
    train = before.recipe.train
    if not train:
        print("dray does not know the losses of a command: compare what it printed")
        return code
    if replays.same(found.losses):
        return code
    if before.gpus and not train.deterministic:
        print("train.deterministic = false: on GPUs, the same run has other losses each time")
    return code or exit_codes.FAILED
