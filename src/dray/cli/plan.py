"""`dray plan`: print what would run, or write it for a job that starts now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray import facts, render
from dray.cli.chosen import Arguments, Chosen, Launcher, chosen, report
from dray.cli.options import GpuMemory, GpusPerNode, Nodes, Ranks, Runs, Sbatch, Site
from dray.config.recipe import Recipe
from dray.config.sites import Choice
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.images import store
from dray.planning import missing_facts
from dray.planning.schema import Plan
from dray.runs import layers, login, write
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
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Count the model's parameters and activations instead of estimating them; needs torch."
        ),
    ] = False,
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
    if facts_file and (nodes or gpus_per_node or sbatch):
        raise ConfigError(
            "the facts already say which nodes and GPUs there are",
            where=facts_file,
            found="--nodes, --gpus-per-node or --sbatch besides --facts",
            fix="leave out these options, or --facts",
        )
    if facts_file:
        seen, choice = write.at_site(_read(facts_file, site, gpu_memory))
    else:
        seen, choice = login.facts(
            recipe, nodes, gpus_per_node or asked.gpus, site, ranks=ranks, options=sbatch or (), gpu_memory=gpu_memory
        )
    if save:
        _write(asked, recipe, seen, choice, folder, run)
        return
    asked.say()
    decided = write.decide(recipe, seen, choice, RunPaths(folder / new_id(recipe.name, job=seen.job)), exact=exact)
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
    print(f"{login.ASSUMED}\n\n" if assumed else "", end="")
    print(render.text(decided) if verbose else f"{render.summary(decided)}\n{_MORE}\n", end="")


def _write(asked: Chosen, recipe: Recipe, seen: Facts, choice: Choice, runs: Path, run: str | None) -> None:
    """Answer slurm/plan.sh in lines `key=value`: all facts that it must correct, or what it needs of the plan."""
    if asked_back := [*missing_facts.ask(recipe, choice.site, seen), *layers.ask(recipe, choice.site, seen)]:
        print("\n".join(asked_back))
        return
    asked.say()
    decided, paths = write.begin(recipe, seen, choice, runs=runs, run=run, beside=asked.beside)
    report(decided)
    print(f"attempt={paths.folder}\ncheckpoints={recipe.checkpoint.folder}\ngrace_s={decided.grace_s}")
    print(f"stage={decided.stage}\nspares={','.join(decided.world.spares)}\nchoices={' '.join(decided.recipe.choices)}")


def _read(name: str, site: str, gpu_memory: float | None) -> Facts:
    if name == "-":
        text = sys.stdin.buffer.read().decode(errors="replace") if sys.stdin else ""
    else:
        text = files.text(name, "the facts", fix="slurm/probe.sh prints facts, inside a job")
    seen = facts.parse(text, where="standard input" if name == "-" else name)
    if site not in ("", seen.site):
        raise ConfigError("the facts already name a site", where=name, wanted=seen.site, found=site, fix="omit --site")
    return seen.model_copy(update={**store.within(Path(seen.image)), "gpu_memory_gb": gpu_memory})
