"""`dray submit`: submit a recipe or a command to Slurm."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import typer

from dray.cli import submit_on
from dray.cli.args import (
    Arguments,
    GpuMemory,
    GpusPerNode,
    Json,
    Nodes,
    Ranks,
    RunName,
    Runs,
    Sbatch,
    Site,
    chosen,
    refuse_or_warn,
    typed,
)
from dray.cli.on import On
from dray.cli.plan import show
from dray.cli.top import watch
from dray.config import dray_home
from dray.contract.findings import ConfigError
from dray.images import store
from dray.runs import replay
from dray.runs import submit as queue
from dray.runs.store import default_runs, new_id, next_attempt, run_named


def submit(
    context: typer.Context,
    arguments: Arguments = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    gpu_memory: GpuMemory = None,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    run: RunName = "",
    dry_run: bool = False,
    as_json: Json = False,
    follow: bool = False,
    on: On = "",
    first: str = "",
) -> None:
    """Check the recipe, make the run folder and call sbatch with the site's options.

    --dry-run: Print the command and the plan; submit nothing.
    --follow: After submitting, watch the run as dray top does.
    --first REMOTE,REMOTE: Submit at these remotes, and keep the job that starts first.

    dray submit recipes/smoke-cpu.toml --nodes 4 --dry-run batch.global_size=32
    dray submit recipes/mine.toml -N4 --gpus-per-node 4 --sbatch=--time=08:00:00
    """
    queue.check(sbatch or [])
    if (on and first) or (follow and (on or first)) or (as_json and dry_run):
        raise ConfigError(
            "two options exclude each other", wanted="one of --on, --first and --follow; one of --json and --dry-run",
            fix="leave out one; after submitting with --on: dray logs --on NAME -f",
        )  # fmt: skip
    if remotes := list(dict.fromkeys(first.split(","))) if first else [on] if on else []:
        asked = chosen(arguments, context, ranks, gpus_per_node)
        options = {
            "nodes": nodes, "gpus-per-node": gpus_per_node or None, "gpu-memory": gpu_memory,
            "runs": runs if typed(context, "runs") else None,
        }  # fmt: skip
        argv = [f"--{name}={value}" for name, value in options.items() if value is not None]
        argv += [f"--sbatch={option}" for option in sbatch or []]
        argv += ["--dry-run"] * dry_run + ["--json"] * as_json
        site = site if typed(context, "site") else ""
        raise typer.Exit(submit_on.submit(remotes, asked, argv, run=run, site=site))
    runs = (runs or default_runs()).absolute()
    folder = run_named(runs, run)
    asked = chosen(arguments, context, ranks, gpus_per_node, folder)
    recipe = asked.recipe()
    before = replay.job_options(folder) if folder and asked.last else None
    asked.say(before.options if before else ())
    if before:
        site, gpu_memory = site or before.site, before.gpu_memory if gpu_memory is None else gpu_memory
    if asked.image:
        os.environ.setdefault("DRAY_IMAGE", asked.image)
    folder = folder or runs / new_id(recipe.name)
    attempt = next_attempt(folder)
    submission = queue.Submission(
        [*([str(asked.path.absolute())] if asked.path else []), *asked.overrides], asked.command, nodes, ranks or 0,
        gpus_per_node or asked.gpus, site, gpu_memory, sbatch or (), before.options if before else None,
    )  # fmt: skip
    job = queue.planned(recipe, attempt, submission)  # before the image, which may take long to build
    plan = job.plan
    if dry_run:
        print(f"{shlex.join(job.argv)}\n")
        show(plan, verbose=False)
        image = store.job_file(dray_home.root(), plan.recipe.image_name, plan.engine)
        if how := store.absent(image, plan.recipe.image_name, plan.engine):
            print(f"dray: note: {image} does not exist; before you submit: {how}", file=sys.stderr)
        return
    store.required(dray_home.root(), plan.recipe.image_name, recipe.image_digest, plan.engine)
    queue.require_free(folder, sbatch or [])
    refuse_or_warn(plan)
    code = Path(recipe.command.folder) if recipe.command else asked.beside
    number = queue.submit(job.argv, folder, recipe.runs.share, code)
    if as_json:
        print(json.dumps({"job": number, "run": str(folder), "attempt": attempt.attempt}))
    else:
        which = f", for attempt {attempt.attempt}" if attempt.attempt > 1 else ""
        print(f"job {number} is in the queue{which}\nrun folder: {folder}")
    if follow:
        watch(folder)
