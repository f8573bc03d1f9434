"""`dray plan`: print what would run, or write it for a job that starts now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dray import facts, render
from dray.cli.args import (
    Arguments,
    Chosen,
    GpuMemory,
    GpusPerNode,
    Json,
    Nodes,
    Ranks,
    Runs,
    Sbatch,
    Site,
    chosen,
    refuse_or_warn,
)  # fmt: skip
from dray.config.recipe import Recipe
from dray.images import store
from dray.planning import missing_facts
from dray.planning.schema import Plan
from dray.runs import prepare, submit
from dray.runs.store import RunPaths, default_runs, new_id, run_named

_MORE = "-v shows all: each environment variable and bind with its source, and what runs on each node"


def plan(
    context: typer.Context,
    arguments: Arguments = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    as_json: Json = False,
    verbose: bool = False,
    gpu_memory: GpuMemory = None,
    site: Site = "",
    sbatch: Sbatch = None,
    runs: Runs = None,
    write: bool = False,
    run: Annotated[str | None, typer.Option(hidden=True, help="Name of the run that dray submit began.")] = None,
) -> None:
    """Print in ten lines what would run, without starting it; -v prints everything, with the source of each value.

    --verbose, -v: Print the whole plan.
    --write: For the batch script: read facts, write the attempt's folder and print its path, or ask.

    dray plan recipes/smoke-cpu.toml --nodes 4 batch.global_size=32
    dray plan recipes/smoke-cpu.toml --site lumi -N4 image=rocm -v
    """
    folder = (runs or default_runs()).absolute()
    asked = chosen(arguments, context, ranks, gpus_per_node, run_named(folder, run or ""))
    recipe = asked.recipe()
    if write:
        _write(asked, recipe, folder, run, gpu_memory)
        return
    seen, choice = submit.job_facts(
        recipe, nodes, gpus_per_node or asked.gpus, site, ranks=ranks, options=sbatch or (), gpu_memory=gpu_memory
    )
    asked.say()
    decided = prepare.decide(recipe, seen, choice, RunPaths(folder / new_id(recipe.name)))
    if as_json:
        print(decided.model_dump_json(indent=1))
        refuse_or_warn(decided)
        return
    show(decided, verbose=verbose)
    decided.refuse()


def show(decided: Plan, *, verbose: bool) -> None:
    """Print the plan of a login node in ten lines, or all of it."""
    print(f"{submit.ASSUMED}\n")
    print(render.text(decided) if verbose else f"{render.summary(decided)}\n{_MORE}\n", end="")


def _write(asked: Chosen, recipe: Recipe, runs: Path, run: str | None, gpu_memory: float | None) -> None:
    """Answer slurm/plan.sh in lines `key=value`: all facts that it must correct, or what it needs of the plan."""
    seen = facts.parse(sys.stdin.buffer.read().decode(errors="replace"), where="standard input")
    seen = seen.model_copy(update={**store.within(Path(seen.image)), "gpu_memory_gb": gpu_memory})
    seen, choice = prepare.at_site(seen)
    missing = [*missing_facts.ask(recipe, choice.site, seen), *prepare.ask_for_layer(recipe, choice.site, seen)]
    if missing:
        print("\n".join(missing))
        return
    asked.say()
    decided, paths = prepare.write(recipe, seen, runs=runs, run=run, choice=choice, beside=asked.beside)
    refuse_or_warn(decided)
    print(f"attempt={paths.folder}\ncheckpoints={recipe.checkpoint.folder}")
    print(f"stage={decided.stage}\nspares={','.join(decided.world.spares)}")
    print(f"choices={' '.join(decided.recipe.choices)}")
