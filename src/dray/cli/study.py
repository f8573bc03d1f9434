"""Studies: run one recipe several times, and compare."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dray import process
from dray.cli.args import Here, Json, Nodes, Overrides, RecipeFile, Runs, Sbatch, Site, program
from dray.contract.control_characters import cell, printable
from dray.contract.findings import ConfigError
from dray.fitness import network_and_site
from dray.planning import tune_search
from dray.planning.tune_search import KEYS, Value
from dray.planning.world import divide
from dray.runs import prepare, status
from dray.runs import study as studies
from dray.runs.store import default_runs, new_id
from dray.runs.study import PARITY, Member, Row, Study, Tuner

study_verbs = typer.Typer()

PerNode = Annotated[
    int | None, typer.Option("--ranks", "--gpus-per-node", min=1, help="Ranks per node; with GPUs, one GPU for each.")
]


@study_verbs.command()
def sweep(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Nodes = None,
    ranks: PerNode = None,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
) -> int:
    """Run a recipe once for each combination of values, such as train.lr=1e-3,4e-3, and print a table.

    With Slurm, the runs are the tasks of a job array, and `dray study show` shows them later. Without Slurm, or inside
    a job, the runs follow one another here.

    dray study sweep recipes/smoke-cpu.toml train.lr=1e-3,4e-3 train.steps=20
    dray study sweep gpt2-wikitext-ddp train.lr=1e-4,3e-4,1e-3 --nodes 2
    """
    values = [_values(setting) for setting in overrides or []]
    common = [one[0] for one in values if len(one) == 1]
    several = [one for one in values if len(one) > 1]
    if not several:
        raise ConfigError(
            "there is nothing to compare", wanted="a setting with several values",
            fix="dray study sweep RECIPE train.lr=1e-4,3e-4,1e-3",
        )  # fmt: skip
    members = [
        Member(settings=list(settings), nodes=nodes, ranks_per_node=ranks or 0)
        for settings in itertools.product(*several)
    ]
    study = Study(kind="sweep", recipe=str(recipe), settings=common, site=site, sbatch=sbatch or [], members=members)
    return _start(study, runs)


# A value of a list of values: brackets, one pair inside another too, and quotes keep their commas.
_VALUE = re.compile(r"""(?:\[(?:[^\[\]]|\[[^\]]*\])*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")


def _values(setting: str) -> list[str]:
    """key=a,b,c as key=a, key=b and key=c."""
    key, equals, text = setting.partition("=")
    return [f"{key}{equals}{value}" for value in _VALUE.findall(text)] or [setting]


@study_verbs.command()
def scale(
    recipe: RecipeFile,
    ranks: Annotated[
        str, typer.Option("--gpus", "--ranks", metavar="1,2,4", help="Numbers of GPUs, or of ranks on CPUs.")
    ],
    overrides: Overrides = None,
    per_node: Annotated[
        int, typer.Option(min=0, help="GPUs or ranks per full node. 0: the site's GPUs, or all on one node.")
    ] = 0,
    weak: bool = False,
    site: Site = "",
    runs: Runs = None,
    sbatch: Sbatch = None,
) -> int:
    """Run a recipe on several numbers of GPUs, and compare speed, efficiency and losses; exit code 1 if losses differ.

    With Slurm, dray submits the runs: those with the same nodes and options as one job array. `dray study show` shows
    them later. Without Slurm, or inside a job, the runs follow one another here.

    --weak: Weak scaling: hold the batch of each rank, not the global batch.

    dray study scale recipes/smoke-cpu.toml --ranks 1,2 train.steps=20
    dray study scale recipes/gpt2-wikitext-ddp.toml --gpus 1,2,4,8,16 --weak
    """
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", ranks):
        raise ConfigError(
            "there is nothing to compare", wanted="numbers with commas", found=ranks,
            fix="dray study scale RECIPE --gpus 1,2,4,8; on CPUs --ranks 1,2",
        )  # fmt: skip
    counts = sorted({int(count) for count in ranks.split(",")})
    study = Study(
        kind="weak" if weak else "strong", recipe=str(recipe), settings=overrides or [], site=site, sbatch=sbatch or []
    )
    read = prepare.read_recipe(recipe, study.settings)
    if weak and read.batch is None:
        raise ConfigError("--weak needs a recipe with [batch]", fix="leave out --weak")
    if read.image != "cpu":
        per_node = per_node or network_and_site.site(site).site.gpus_per_node
    per_node = per_node or max(counts)
    for count in counts:
        # A node is full before there is a second.
        nodes, rest = divmod(count, per_node) if count > per_node else (1, 0)
        if rest:
            raise ConfigError(
                f"{count} ranks do not fill whole nodes of {per_node}", wanted=f"a multiple of {per_node}",
                fix="choose other numbers, or set --per-node",
            )  # fmt: skip
        member = Member(ranks=count, nodes=nodes, ranks_per_node=count // nodes)
        if read.batch:
            size = read.batch.global_size * count // counts[0] if weak else read.batch.global_size
            divide(read.batch.model_copy(update={"global_size": size}), world_size=count)  # before the first begins
            member.settings += [f"batch.global_size={size}"] if weak else []
        study.members.append(member)
    if not weak and read.train and read.train.precision == "fp32":
        study.tolerance, study.reason = PARITY, "the recipe is fp32 and the global batch is the same"
    return _start(study, runs)


def _start(study: Study, runs: Path | None) -> int:
    """Start all runs, and print the table."""
    study.recipe = str(Path(study.recipe).absolute())  # a job has another working directory
    folder, code = study.begin((runs or default_runs()).absolute()), 0
    if process.which("sbatch") and "SLURM_JOB_ID" not in os.environ:
        study.submit(folder)
    else:
        code = study.run_here(folder, program())
    print()
    failed = _show(folder)
    return code or failed


@study_verbs.command()
def show(
    study: str,
    runs: Runs = None,
    as_json: Json = False,
) -> int:
    """Show the table of a study as it is now, also while jobs wait; exit code 1 if a run failed, or if losses differ.

    STUDY: The study: its folder, its name or the beginning of it.

    dray study show 20261120-124439-scale-smoke-cpu-cea81f --json
    """
    return _show(studies.find(study, (runs or default_runs()).absolute()), as_json=as_json)


def _show(folder: Path, *, as_json: bool = False) -> int:
    """Print the table; 1 if a run failed or losses differ, with tune if no candidate runs."""
    study = studies.load(folder)
    rows = studies.look(folder, study)
    best = studies.best_row(rows) if study.kind == "tune" else None
    if as_json:
        document = {"study": str(folder), "kind": study.kind, "runs": [row.model_dump() for row in rows]}
        print(json.dumps(document | {"best": best and best.run}, indent=1))
    else:
        print("\n".join(_table(study, rows, best)))
        print(f"\nagain: dray study show {shlex.quote(str(folder))}")
    if study.kind == "tune":
        return int(best is None)
    return int(any(row.apart or row.state in (status.FAILED, status.STOPPED, status.LOST) for row in rows))


@study_verbs.command("tune")
def tune_recipe(
    recipe: RecipeFile,
    overrides: Overrides = None,
    every: Annotated[bool, typer.Option("--all", help="Measure all candidates instead of searching.")] = False,
    steps: Annotated[
        int, typer.Option(min=5, max=10_000, help=f"Steps to measure, after {studies.TUNE_WARM_UP} warm-up steps.")
    ] = 10,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit of each candidate.")] = 900,
    nodes: Nodes = None,
    ranks: PerNode = None,
    site: Site = "",
    here: Here = False,
    runs: Runs = None,
) -> int:
    """Find the settings with which a recipe trains fastest to the same losses, by short runs one after another.

    It tries strategies, micro-batches, activation checkpointing, compilation, ways to compute the loss and fsdp's
    sharding; or, of the keys with several values, these values alone. It never changes what is trained, and writes the
    best as a recipe. In a job or an salloc it measures on the job's nodes, else on this machine.

    dray study tune recipes/smoke-cpu.toml --nodes 1
    dray study tune smoke-cpu batch.per_device=2,4,8 train.strategy=ddp,fsdp --all
    """
    settings, given = list[str](), dict[str, Sequence[Value]]()
    for override in overrides or []:
        key, _, text = override.partition("=")
        if len(_values(override)) == 1:
            settings.append(override)
        elif key in KEYS:
            given[key] = tune_search.values(text)
        else:
            raise ConfigError(
                f"dray study tune does not change {key}", wanted=f"some of {', '.join(KEYS)}",
                fix=shlex.join(["dray", "study", "sweep", str(recipe), override]),
            )  # fmt: skip
    read = prepare.read_recipe(recipe, [*settings, *([f"ranks_per_node={ranks}"] if ranks else [])])
    if read.train is None:
        raise ConfigError(
            "dray study tune is for dray's own trainer", wanted="a recipe with [train] and [batch]",
            fix="dray study sweep RECIPE KEY=VALUE,VALUE compares settings of a command",
        )  # fmt: skip
    place = studies.tuning_place(read, os.environ, nodes=nodes, here=here, site=site)
    plan = place.first(read)
    fixed = [setting.partition("=")[0] for setting in settings]
    space = tune_search.space(plan, given, [*given] or [key for key in KEYS if key not in fixed])
    configuration = prepare.find_inputs(plan.recipe, place.facts).configuration or {}
    tolerance, reason = tune_search.tolerance(plan.recipe, configuration, exact=PARITY)
    study = Study(
        kind="tune", recipe=str(recipe), site=site, warm_up=studies.TUNE_WARM_UP, tolerance=tolerance, reason=reason
    )
    folder = (runs or default_runs()).absolute() / new_id(f"tune-{read.name}")
    print(folder, flush=True)
    watched = ["env", "-u", "ENVIRONMENT", "timeout", "--foreground", "--signal=INT", "--kill-after=60", f"{limit:g}"]
    tuner = Tuner(folder, study, read, place, space.start, plan.world.size, [*watched, *program()])
    try:
        tuner.measure(space, steps=steps, every=every)
    finally:
        print()
        failed = _show(folder)
    if not failed:
        print(f"dray run {shlex.quote(str(tuner.write_best()))}")
    return failed


# Of each column its name, the attribute of the row, and how both are written: < is on the left.
_COLUMNS = {
    "ranks": ("ranks", ">"),
    "settings": ("label", "<"),
    "state": ("state", "<"),
    "tokens/s": ("tokens_per_s", ">,.0f"),
    "+-": ("spread", ">.0%"),
    "speedup": ("speedup", ">.2f"),
    "efficiency": ("efficiency", ">.0%"),
    "memory GB": ("memory_gb", ">.2f"),
    "loss": ("loss", ">.5f"),
    "eval loss": ("eval_loss", ">.5f"),
    "run": ("run", "<"),
}
_SCALE = ("ranks", "state", "tokens/s", "speedup", "efficiency", "loss", "eval loss", "run")
_SHOWN = {
    "strong": _SCALE,
    "weak": _SCALE,
    "sweep": ("settings", "state", "tokens/s", "loss", "eval loss", "run"),
    "tune": ("settings", "state", "tokens/s", "+-", "memory GB", "loss", "run"),
}


def _table(study: Study, rows: Sequence[Row], best: Row | None) -> list[str]:
    """A line for each run; below, why some failed, and whether losses agree that should be equal."""
    shown = sorted(rows, key=lambda row: -(row.tokens_per_s or 0.0)) if study.kind == "tune" else rows
    lines = [""] * (len(rows) + 1)
    for name in _SHOWN[study.kind]:
        attribute, form = _COLUMNS[name]
        values = [getattr(row, attribute) for row in shown]
        cells = [name, *("" if value is None else cell(f"{value:{form[1:]}}") for value in values)]
        width = max(map(len, cells))
        lines = [f"{line}{text:{form[0]}{width}}  " for line, text in zip(lines, cells, strict=True)]
    notes = [_agreement(study, rows)] if study.tolerance else []
    notes += [printable(f"{row.label}: {row.apart or row.why}") for row in rows if row.apart or row.why]
    if best:
        notes.append(f"best: {best.label}: {studies.speed(best)}")
    return [*map(str.rstrip, lines), *([""] if notes else []), *notes]


def _agreement(study: Study, rows: Sequence[Row]) -> str:
    """Whether losses agree that should be equal."""
    if any(row.apart for row in rows):
        return f"LOSSES DIFFER by more than {study.tolerance:.0e} ({study.reason}):"
    differences = [row.difference for row in rows if row.difference is not None]
    if not differences:
        return "losses: not compared yet; no two runs have logged the same step"
    return f"losses: {max(differences):.1e} apart at most, step by step; they agree"
