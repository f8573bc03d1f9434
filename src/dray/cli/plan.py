"""`dray plan`: print what would run, or write it for a job that starts now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray import facts, render
from dray.cli.args import (
    Arguments,
    GpuMemory,
    GpusPerNode,
    Launcher,
    Nodes,
    Ranks,
    Runs,
    Sbatch,
    Site,
    chosen,
    report,
)  # fmt: skip
from dray.contract import files
from dray.facts import Facts
from dray.images import store
from dray.planning import missing_facts
from dray.planning.schema import Plan
from dray.runs import layers, login, prepare
from dray.runs.store import RunPaths, default_runs, new_id, run_named

_MORE = "-v shows all: each environment variable and bind with its source, and what runs on each node"
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the whole plan.")]


def plan(
    context: typer.Context,
    arguments: Arguments = None,
    launcher: Launcher = "",
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    facts_file: Annotated[
        str | None,
        typer.Option("--facts", metavar="FILE", help="File with the output of slurm/probe.sh; - reads standard input."),
    ] = None,
    form: Annotated[
        Literal["text", "json", "bash"],
        typer.Option("--format", help="text, json (as in plan.json) or bash (as in node.sh)."),
    ] = "text",
    verbose: Verbose = False,
    gpu_memory: GpuMemory = None,
    site: Site = "",
    sbatch: Sbatch = None,
    runs: Runs = None,
    save: Annotated[
        bool,
        typer.Option(
            "--write", help="For the batch script: write the attempt's folder and print its path, or ask for facts."
        ),
    ] = False,
    run: Annotated[str | None, typer.Option(hidden=True, help="Name of the run that dray submit began.")] = None,
) -> None:
    """Print in ten lines what would run, without starting it; -v prints everything, with the source of each value.

    dray plan recipes/smoke-cpu.toml --nodes 4 batch.global_size=32
    dray plan recipes/smoke-cpu.toml --site lumi -N4 image=rocm --format bash
    """
    folder = (runs or default_runs()).absolute()
    asked = chosen(arguments, launcher, context, ranks, gpus_per_node, run_named(folder, run or ""))
    recipe = asked.recipe()
    if facts_file:
        seen, choice = prepare.at_site(_read(facts_file, gpu_memory))
    else:
        gpus = gpus_per_node or asked.gpus
        seen, choice = login.facts(recipe, nodes, gpus, site, ranks=ranks, options=sbatch or (), gpu_memory=gpu_memory)
    # slurm/plan.sh reads lines `key=value`: all facts that it must correct, or what it needs of the plan.
    missing = [*missing_facts.ask(recipe, choice.site, seen), *layers.ask(recipe, choice.site, seen)] if save else []
    if missing:
        print("\n".join(missing))
        return
    asked.say()
    if save:
        decided, paths = prepare.write(recipe, seen, runs=folder, run=run, choice=choice, beside=asked.beside)
        report(decided)
        print(f"attempt={paths.folder}\ncheckpoints={recipe.checkpoint.folder}\ngrace_s={decided.grace_s}")
        print(f"stage={decided.stage}\nspares={','.join(decided.world.spares)}")
        print(f"choices={' '.join(decided.recipe.choices)}")
        return
    decided = prepare.decide(recipe, seen, choice, RunPaths(folder / new_id(recipe.name, job=seen.job)))
    if form == "text":
        show(decided, verbose=verbose, assumed=bool(seen.login))
        decided.refuse()
        return
    if form == "json":
        print(decided.model_dump_json(indent=1))
    report(decided)
    if form == "bash":  # of a plan that is refused there is no script
        print(render.node_script(decided), end="")


def show(decided: Plan, *, verbose: bool, assumed: bool) -> None:
    """Print the plan in ten lines, or all of it."""
    if assumed:
        print(f"{login.ASSUMED}\n")
    print(render.text(decided) if verbose else f"{render.summary(decided)}\n{_MORE}\n", end="")


def _read(name: str, gpu_memory: float | None) -> Facts:
    if name == "-":
        text = sys.stdin.buffer.read().decode(errors="replace")
    else:
        text = files.text(name, "the facts", fix="slurm/probe.sh prints facts, inside a job")
    seen = facts.parse(text, where="standard input" if name == "-" else name)
    return seen.model_copy(update={**store.within(Path(seen.image)), "gpu_memory_gb": gpu_memory})
