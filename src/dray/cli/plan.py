"""`dray plan`: show what would run, or write it down for a job that is about to run it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray import facts, render
from dray.cli.options import GpuMemory, GpusPerNode, Launcher, Nodes, Runs, Site, Words, chosen
from dray.config import checkout, sites
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.fitness import host, lint
from dray.images import store
from dray.planning import advice, sizes
from dray.runs import local, write
from dray.runs.paths import RunPaths, default_runs, new_id

ASSUMED = "assumed, since nothing was probed: nodes' names, GPUs, HF_HOME, job number 0, the site's engine or Apptainer"


def plan(
    context: typer.Context,
    words: Words = None,
    launcher: Launcher = "",
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 0,
    facts_file: Annotated[
        str | None, typer.Option("--facts", metavar="FILE", help="What slurm/probe.sh printed; - is standard input.")
    ] = None,
    form: Annotated[
        Literal["text", "json", "bash"],
        typer.Option("--format", help="text to read, json (plan.json), bash (node.sh)."),
    ] = "text",
    gpu_memory: GpuMemory = None,
    site: Site = "",
    runs: Runs = None,
    save: Annotated[
        bool, typer.Option("--write", help="Make the run folder and print that of the attempt instead of the plan.")
    ] = False,
    run: Annotated[str | None, typer.Option(hidden=True, help="The id of a run that dray submit has begun.")] = None,
) -> None:
    """Print exactly what would run, and who set what. Starts nothing."""
    settings = chosen(words, launcher, context).recipe()
    seen = _read(facts_file) if facts_file else assumed(settings, nodes, gpus_per_node, site)
    if facts_file and (nodes or gpus_per_node or site not in ("", seen.site)):
        raise ConfigError(
            "the facts already say which nodes, GPUs and site there are",
            where=facts_file,
            found="--nodes, --gpus-per-node or another site (--site, DRAY_SITE) beside --facts",
            fix="leave these out, or --facts",
        )
    folder = (runs or default_runs()).absolute()
    if facts_file:
        store.require_variant(settings.image)
    if save:
        written, paths = write.write(settings, seen, runs=folder, run=run)
        print(lint.warnings(written, {}), end="", file=sys.stderr)  # the job's own environment is not seen from here
        print(paths.folder)
        return
    decided = write.decide(settings, seen, RunPaths(folder / new_id(settings.name, job=seen.job)))
    if form == "json":
        print(decided.model_dump_json(indent=1))
    elif form == "bash":
        print(render.node_script(decided), end="")
    else:
        here, _ = sites.choose(seen)
        estimate = "" if facts_file else sizes.words(decided, here, gpu_memory)
        if not facts_file:
            print(f"{ASSUMED}\n")
        print(render.text(decided), end="")
        if estimate:
            print(f"\n{estimate}", end="")
        if not facts_file:
            print(f"\n{advice.lines(decided, here)}", end="")


def _read(name: str) -> Facts:
    if name == "-":
        return facts.parse(sys.stdin.read(), where="standard input")
    try:
        return facts.parse(Path(name).read_text(encoding="utf-8", errors="replace"), where=name)
    except OSError as error:
        fix = "slurm/probe.sh writes facts, inside a job"
        raise ConfigError("the facts cannot be read", where=name, found=error.strerror, fix=fix) from error


def assumed(recipe: Recipe, nodes: int | None, gpus: int, site: str) -> Facts:
    """A Slurm cluster that gives what is asked for, when nothing was probed."""
    count = nodes or recipe.nodes
    seen = Facts(
        scheduler="slurm",
        nodelist=f"node[1-{count}]" if count > 1 else "node1",
        nodes=count,
        gpus_per_node=gpus,
        engine="apptainer",
        image=str(store.job_file(checkout.root(), recipe.image)),
        site=site,
        cluster=host.cluster_name(),
        login=socket.gethostname(),
        hf_home=local.hf_home(),
    )
    chosen_site, _ = sites.choose(seen)
    wanted = gpus or (0 if recipe.image == "cpu" else chosen_site.gpus_per_node)
    return seen.model_copy(update={"gpus_per_node": wanted, "engine": chosen_site.engine or "apptainer"})
