"""`dray study`: run one recipe several times, and compare."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from dray import process
from dray.cli import study_table
from dray.cli.args import (
    Engine,
    GpuMemory,
    GpusPerNode,
    Json,
    Nodes,
    Overrides,
    Ranks,
    RecipeFile,
    Runs,
    Sbatch,
    Site,
    program,
    require_gpus,
    typed,
)
from dray.contract.findings import ConfigError, counted
from dray.fitness import host
from dray.planning import tune_search
from dray.planning.tune_search import KEYS, Value
from dray.planning.world import divide
from dray.runs import local_inputs, prepare, status, tune
from dray.runs import study as studies
from dray.runs.store import default_runs, new_id
from dray.runs.study import MOST, Member, Study
from dray.runs.tune import Tuner

app = typer.Typer(help="Run one recipe several times, and compare: sweep, scale and tune.", no_args_is_help=True)
AtOnce = Annotated[
    int | None,
    typer.Option(metavar="M", min=1, help="With Slurm: run at most this many tasks of a job array at once."),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Recipe to write, with the best settings of tune.")]


@app.command()
def sweep(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    at_most: AtOnce = None,
) -> None:
    """Run a recipe once for each combination of values, such as train.lr=1e-3,4e-3, and print a table.

    With Slurm, the runs are the tasks of a job array, and `dray study show` shows them later. Without Slurm, or inside
    a job, the runs follow one another here.

    dray study sweep recipes/smoke-cpu.toml train.lr=1e-3,4e-3 train.steps=20
    dray study sweep gpt2-wikitext-ddp train.lr=1e-4,3e-4,1e-3 --at-most 2
    """
    require_gpus(ranks, gpus_per_node)
    values = [_values(setting) for setting in overrides or []]
    common = [one[0] for one in values if len(one) == 1]
    several = [one for one in values if len(one) > 1]
    if not several:
        raise ConfigError(
            "there is nothing to compare", wanted="a setting with several values",
            fix="dray study sweep RECIPE train.lr=1e-4,3e-4,1e-3",
        )  # fmt: skip
    if (count := math.prod(map(len, several))) > MOST:
        raise ConfigError("a sweep has too many runs", wanted=f"at most {MOST}", found=count)
    size = {"nodes": nodes, "ranks_per_node": ranks or 0, "gpus_per_node": gpus_per_node}
    members = [Member.model_validate({"settings": list(own), **size}) for own in itertools.product(*several)]
    _start("sweep", recipe, common, members, site, sbatch, at_most, runs)


def _values(setting: str) -> list[str]:
    """key=a,b,c as key=a, key=b and key=c; commas within brackets or quotes divide nothing."""
    key, equals, text = setting.partition("=")
    found = re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)
    return [f"{key}{equals}{value}" for value in found] or [setting]


@app.command()
def scale(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option(metavar="1,2,4", help="Numbers of GPUs, one run for each.")] = "",
    ranks: Annotated[str, typer.Option(metavar="1,2", help="On CPUs: numbers of ranks, one run for each.")] = "",
    per_node: Annotated[
        int, typer.Option(min=0, help="GPUs or ranks per full node. 0: the site's GPUs, or all on one node.")
    ] = 0,
    weak: Annotated[
        bool, typer.Option("--weak", help="Weak scaling: hold the batch of each rank, not the global batch.")
    ] = False,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
    at_most: AtOnce = None,
) -> None:
    """Run a recipe on several numbers of GPUs, and compare speed, efficiency and losses; exit code 1 if losses differ.

    With Slurm, dray submits the runs: those with the same nodes and options as one job array. `dray study show` shows
    them later. Without Slurm, or inside a job, the runs follow one another here.

    dray study scale recipes/smoke-cpu.toml --ranks 1,2 train.steps=20
    dray study scale recipes/gpt2-wikitext-ddp.toml --gpus 1,2,4,8,16 --weak
    """
    text = gpus or ranks
    if bool(gpus) == bool(ranks) or not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text):
        raise ConfigError(
            "there is nothing to compare", wanted="either --gpus or --ranks, with several numbers", found=text,
            fix="dray study scale RECIPE --gpus 1,2,4,8; on CPUs --ranks 1,2",
        )  # fmt: skip
    counts = sorted({int(count) for count in text.split(",")})
    per_node = per_node or (host.site(site).site.gpus_per_node if gpus else 0) or max(counts)
    settings, members = overrides or [], list[Member]()
    batch = prepare.read_recipe(recipe, settings).batch
    for count in counts:
        # A node is full before there is a second.
        nodes, each = divmod(count, per_node) if count > per_node else (1, count)
        if count > per_node and each:
            raise ConfigError(
                f"{count} ranks do not fill whole nodes of {per_node}", wanted=f"a multiple of {per_node}",
                fix="choose other numbers, or set --per-node",
            )  # fmt: skip
        member = Member(ranks=count, nodes=nodes)
        member.gpus_per_node, member.ranks_per_node = (each or per_node, 0) if gpus else (0, each or per_node)
        if weak and batch is None:
            raise ConfigError("--weak needs a recipe with [batch]", fix="leave out --weak")
        if batch:
            size = batch.global_size * count // counts[0] if weak else batch.global_size
            divide(batch.model_copy(update={"global_size": size}), world_size=count)  # before the first run begins
            member.settings += [f"batch.global_size={size}"] if weak else []
        members.append(member)
    _start("weak" if weak else "strong", recipe, settings, members, site, sbatch, at_most, runs)


def _start(
    kind: Literal["strong", "weak", "sweep"], recipe: Path, settings: list[str], members: list[Member], site: str,
    sbatch: list[str] | None, at_most: int | None, runs: Path | None,
) -> None:  # fmt: skip
    """Start all runs, and print the table."""
    if site.endswith(".toml"):  # a job has another working directory
        site = str(Path(site).absolute())
    study = Study(
        kind=kind, recipe=str(recipe.absolute()), settings=settings, site=site, sbatch=sbatch or [], at_most=at_most,
        members=members,
    )  # fmt: skip
    folder, code = study.begin((runs or default_runs()).absolute()), 0
    if process.which("sbatch") and "SLURM_JOB_ID" not in os.environ:
        study.submit(folder)
    else:
        code = study.run_here(folder, program())
    if not folder.exists():  # the first was refused
        raise typer.Exit(code)
    print()
    _show(folder, code=code)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="The study: its folder, its name or the beginning.")],
    runs: Runs = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Show the table of a study as it is now, also while jobs wait; exit code 1 if a run failed, or if losses differ.

    dray study show 20261120-124439-scale-smoke-cpu-cea81f --json
    dray study show 20261125-151209-tune-smoke-cpu-cea81f --out tuned.toml
    """
    if out:
        tune.require_writable(out)
    _show(studies.find(name, (runs or default_runs()).absolute()), out, as_json=as_json)


def _show(folder: Path, out: Path | None = None, *, as_json: bool = False, code: int = 0) -> None:
    """Print the table; with tune, write the best setting as a recipe."""
    study = studies.load(folder)
    rows = studies.look(folder, study)
    best = tune.best(rows) if study.kind == "tune" else None
    lines = study_table.text(study, rows)
    if as_json:
        found = [row.model_dump() | {"job_id": row.job_id} for row in rows]
        document = {"study": str(folder), "kind": study.kind, "runs": found, "best": best and best.run}
        print(json.dumps(document, indent=1))
    else:
        print("\n".join([*lines, "", study_table.again(str(folder), rows)]))
    if study.kind == "tune":
        if code:
            raise typer.Exit(code)
        if best is None:
            raise tune.none_ran(folder, rows)
        if out:
            tune.write_best(folder, study, best, out, [study.about, "", *lines])
            print(f"{out}: dray run {out}", file=sys.stderr if as_json else sys.stdout)
        return
    failed = any(row.apart or row.state in (status.FAILED, status.STOPPED, status.LOST) for row in rows)
    raise typer.Exit(code or int(failed))


@app.command("tune")
def tune_recipe(
    context: typer.Context,
    recipe: RecipeFile,
    overrides: Overrides = None,
    keys: Annotated[
        str, typer.Option(metavar="KEY,KEY", help="Keys to tune, such as strategy,per_device. Default: all.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Measure all candidates instead of searching.")] = False,
    steps: Annotated[
        int, typer.Option(min=5, max=10_000, help=f"Steps to measure, after {tune.WARM_UP} warm-up steps.")
    ] = 10,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit of each candidate.")] = 900,
    out: Out = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    gpu_memory: GpuMemory = None,
    engine: Engine = "bare",
    site: Site = "",
    here: Annotated[bool, typer.Option("--local", help="Inside an salloc: use only this machine.")] = False,
    runs: Runs = None,
) -> None:
    """Find the settings with which a recipe trains fastest to the same losses, by short runs one after another.

    It tries strategies, micro-batches, activation checkpointing, compilation, ways to compute the loss and fsdp's
    sharding. It never changes what is trained.
    In a job or an salloc it measures on the job's nodes, else on this machine.

    dray study tune recipes/smoke-cpu.toml --nodes 1 --out tuned.toml
    dray study tune recipes/smoke-cpu.toml --keys strategy,loss --all
    dray study tune smoke-cpu batch.per_device=2,4,8 train.compile=false
    """
    if out:
        tune.require_writable(out)
    settings, given = list[str](), dict[str, Sequence[Value]]()
    for override in overrides or []:
        key, _, text = override.partition("=")
        if key in KEYS and "," in text:
            given[key] = tune_search.values(text)
        else:
            settings.append(override)
    read = prepare.read_recipe(recipe, [*settings, *([f"ranks_per_node={ranks}"] if ranks else [])])
    if read.train is None:
        raise ConfigError(
            "dray study tune is for dray's own trainer", where=recipe, wanted="a recipe with [train] and [batch]",
            found="a recipe with [command], whose settings dray does not know",
            fix="dray study sweep RECIPE KEY=VALUE,VALUE compares settings of a command",
        )  # fmt: skip
    place = tune.place(
        read, os.environ, nodes=nodes, gpus_per_node=gpus_per_node or (ranks or 0) * (read.image != "cpu"),
        gpu_memory=gpu_memory, engine=engine, here=here or typed(context, "engine"), site=site,
    )  # fmt: skip
    plan = place.first(read, Path())
    fixed = [setting.partition("=")[0] for setting in settings]
    tuned = tune_search.keys(keys) if keys else tuple(key for key in KEYS if key not in fixed)
    space = tune_search.space(plan, given, tuned)
    grid = len(list(space.every()))
    if grid == 1 or (every and grid > MOST):
        raise ConfigError(
            "there is nothing to tune" if grid == 1 else "--all has too many candidates",
            wanted=f"2 to {MOST} candidates, by several values of {', '.join(KEYS)}",
            found=f"{counted(grid, 'candidate')} on {counted(plan.world.size, 'rank')}",
            fix="use other --keys or values such as batch.per_device=4,8, or leave out --all",
        )
    configuration = local_inputs.files(plan.recipe, place.facts).configuration or {}
    tolerance, reason = tune_search.tolerance(plan.recipe, configuration, exact=studies.PARITY)
    about = f"{counted(grid, 'candidate')} of {read.name}, on {counted(plan.world.size, 'rank')} on "
    about += f"{counted(len(plan.world.nodes), 'node')} ({plan.engine}, {plan.site})"
    study = Study(
        kind="tune", recipe=str(recipe), options=list(place.options), about=about, ranks=plan.world.size,
        warm_up=tune.WARM_UP, tolerance=tolerance, reason=reason,
    )  # fmt: skip
    folder = (runs or default_runs()).absolute() / new_id(f"tune-{read.name}")
    print(f"{about}\n{folder}", flush=True)
    watched = ["env", "-u", "ENVIRONMENT", "timeout", "--foreground", "--signal=INT", "--kill-after=60", f"{limit:g}"]
    tuner = Tuner(folder, study, read, place, space.start, [*watched, *program()])
    code = 0
    try:
        tuner.measure(space, steps=steps, every=every)
    except KeyboardInterrupt:
        code = 130
    print()
    _show(folder, out, code=code)
