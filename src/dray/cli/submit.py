"""`dray submit`: a recipe to the cluster's queue."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dray import render
from dray.cli.options import GpuMemory, GpusPerNode, Launcher, Nodes, Runs, Site, Words, chosen
from dray.cli.plan import ASSUMED, assumed
from dray.config import checkout, sites
from dray.contract.findings import ConfigError
from dray.fitness import lint
from dray.images import store
from dray.planning import advice, sizes
from dray.runs import submit as queue
from dray.runs import write
from dray.runs.paths import RunPaths, default_runs, new_id


def submit(
    context: typer.Context,
    words: Words = None,
    launcher: Launcher = "",
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 0,
    gpu_memory: GpuMemory = None,
    site: Site = "",
    runs: Runs = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            "--sbatch",
            metavar="OPTION",
            help="One more option for sbatch, such as --sbatch=--time=08:00:00; may be repeated.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and the plan; submit nothing.")] = False,
) -> None:
    """Check the recipe, make the run folder and call sbatch with the site's options."""
    # The job stands elsewhere.
    site = str(Path(site).absolute()) if site.endswith(".toml") else sites.portable(site)
    for option in sbatch or []:
        if option.startswith(("-N", "--nodes", "-G", "--gpus", "--gres=gpu", "-n", "--ntasks")):
            raise ConfigError(
                "the plan would not know of this option of sbatch",
                found=f"--sbatch {option}",
                fix="give --nodes and --gpus-per-node to dray submit itself; a cluster that wants --gres=gpu:N has "
                'gpu_option = "gres" in its site file (docs/launch.md)',
            )
        if " " in option and not option.partition(" ")[0].count("="):
            raise ConfigError(
                "an option of sbatch is one word", found=f"--sbatch={option!r}", fix="--sbatch=--time=08:00:00"
            )
    asked = chosen(words, launcher, context)
    settings = asked.recipe()
    facts = assumed(settings, nodes, gpus_per_node, site)
    folder = (runs or default_runs()).absolute() / new_id(settings.name)
    chosen_site, _ = sites.choose(facts)
    queue.require_account(chosen_site, sbatch or [])
    plan = write.decide(settings, facts, RunPaths(folder))
    estimate = sizes.words(plan, chosen_site, gpu_memory)
    options = [
        *queue.options(settings, chosen_site, facts.gpus_per_node),
        *([f"--nodes={nodes}"] if nodes else []),
        *(sbatch or []),
    ]
    argv = queue.sbatch(
        script=checkout.root() / "slurm" / ("multinode.sh" if facts.nodes > 1 else "singlenode.sh"),
        options=options,
        folder=folder,
        image=store.required(checkout.root(), settings.image, settings.image_digest).absolute(),
        site=site or ("" if chosen_site.name == sites.GENERIC else sites.portable(chosen_site.name)),
        words=[*([str(asked.path.absolute())] if asked.path else []), *asked.overrides],
        command=asked.command,
    )
    heard = lint.warnings(plan, os.environ) + advice.lines(plan, chosen_site, sbatch or [])
    print(heard, end="", file=sys.stderr)
    if dry_run:
        print(f"{shlex.join(argv)}\n\n{ASSUMED}\n\n{render.text(plan)}\n{estimate}", end="")
        return
    print(estimate, end="", file=sys.stderr)
    print(f"job {queue.submit(argv, folder)} is in the queue\nrun folder: {folder}")
