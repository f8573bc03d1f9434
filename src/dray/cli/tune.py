"""`dray tune`: find the settings with which a recipe trains fastest."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import studies, tune_table
from dray.cli.candidates import recipes
from dray.cli.chosen import Engine, Overrides, found
from dray.cli.options import GpuMemory, GpusPerNode, Json, Nodes, Ranks, Runs, Site, program
from dray.config.recipe import Recipe
from dray.contract import exit_codes, run_folder
from dray.contract.findings import ConfigError, DrayError, counted
from dray.planning import tune_search as tunings
from dray.planning.tune_search import KEYS, Value
from dray.runs import lookup, space, study, tuned, write
from dray.runs.measured import Row
from dray.runs.store import default_runs, new_id
from dray.runs.tune import Tuner
from dray.runs.tuned import Tuning

_MOST = 256
_WARM_UP = 3
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Recipe to write, with the best settings.")]


def tune(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe file, or its name.", autocompletion=recipes),
    ] = None,
    overrides: Overrides = None,
    keys: Annotated[
        str, typer.Option(metavar="KEY,KEY", help="Keys to tune, such as strategy,per_device. Default: all.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Measure all candidates instead of searching.")] = False,
    steps: Annotated[
        int, typer.Option(min=5, max=10_000, help=f"Steps to measure, after {_WARM_UP} warm-up steps.")
    ] = 10,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit of each candidate.")] = 900,
    out: Out = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    gpu_memory: GpuMemory = None,
    engine: Engine = "bare",
    site: Site = "",
    here: Annotated[bool, typer.Option("--local", help="Inside an salloc: use only this machine.")] = False,
    runs: Runs = None,
    table: studies.Table = "",
    as_json: Json = False,
) -> None:
    """Find the settings with which a recipe trains fastest to the same losses, by short runs one after another.

    It tries strategies, micro-batches, activation checkpointing, compilation, ways to compute the loss and fsdp's
    sharding. It never changes what is trained.
    In a job or an salloc it measures on the job's nodes, else on this machine.

    dray tune recipes/smoke-cpu.toml --nodes 1 --out tuned.toml
    dray tune recipes/smoke-cpu.toml --keys strategy,loss --all
    dray tune recipes/smoke-cpu.toml batch.per_device=2,4,8 train.compile=false
    dray tune --table 20261125-151209-tune-smoke-cpu-cea81f --out tuned.toml
    """
    if out:
        tuned.require_place(out, force=force)
    folder = (runs or default_runs()).absolute()
    if table:
        named = study.find(table, folder, run_folder.TUNE)
        kept = tuned.load(named)
        tune_table.show(named, kept, as_json=as_json)
        if out:
            tune_table.write(named, kept, out)
        return
    if recipe is None:
        raise ConfigError("there is nothing to tune", wanted="a recipe", fix="dray tune RECIPE --out tuned.toml")
    settings, given = _divided(overrides or [])
    read = _read(found(recipe), [*settings, *([f"ranks_per_node={ranks}"] if ranks else [])])
    source = context.get_parameter_source("engine")
    asked = space.Asked(
        nodes=nodes, gpus_per_node=gpus_per_node or (ranks or 0) * (read.image != "cpu"), gpu_memory=gpu_memory,
        engine=engine, on_this_machine=here or bool(source and source.name != "DEFAULT"), site=site,
    )  # fmt: skip
    folder /= new_id(f"tune-{read.name}")
    where = space.place(read, asked, os.environ)
    candidates, tuning = _begun(read, where, folder, _keys(keys, settings), given)
    tuning = tuning.model_copy(update={"path": str(found(recipe).absolute()), "steps": steps, "every": every})
    if every and tuning.grid > _MOST:
        raise ConfigError(
            "--all has too many candidates", wanted=f"at most {_MOST}", found=tuning.grid,
            fix="leave out --all, or take fewer with --keys or values such as batch.per_device=4,8",
        )  # fmt: skip
    told = counted(tuning.grid, "candidate")
    print(f"{told} of {read.name}, on {tuning.where}\n{folder}", file=sys.stderr if as_json else sys.stdout, flush=True)

    def tell(number: int, row: Row) -> None:
        print(tune_table.line(number, tuning, row), file=sys.stderr if as_json else sys.stdout, flush=True)

    tuner = Tuner(folder, tuning, read, where, program=program(), limit=limit, tell=tell)
    try:
        tuner.all(candidates)
    except KeyboardInterrupt:
        tune_table.show(folder, tuner.tuning, as_json=as_json)
        raise typer.Exit(130) from None
    except DrayError:
        tune_table.show(folder, tuner.tuning, as_json=as_json)
        raise
    except OSError as refused:
        tune_table.show(folder, tuner.tuning, as_json=as_json)
        raise ConfigError(
            "the table cannot be written", where=folder, found=refused.strerror,
            fix="free space on the disk, or --runs FOLDER", code=exit_codes.UNFIT,
        ) from refused  # fmt: skip
    tune_table.show(folder, tuner.tuning, as_json=as_json)
    tune_table.require_some(folder, tuner.tuning)
    if out:
        tune_table.write(folder, tuner.tuning, out)


def _divided(overrides: Sequence[str]) -> tuple[list[str], dict[str, tuple[Value, ...]]]:
    """The settings of all candidates, and the keys to tune that got several values."""
    settings, given = [], {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key.strip() in KEYS and "," in text:
            given[key.strip()] = tunings.values(text)
        else:
            settings.append(override)
    return settings, given


def _keys(text: str, settings: Sequence[str]) -> tuple[str, ...]:
    """The keys of --keys, else all keys that have no single value on the command line."""
    if text:
        return tunings.keys(text)
    fixed = {setting.partition("=")[0].strip() for setting in settings}
    return tuple(key for key in KEYS if key not in fixed)


def _read(path: Path, settings: Sequence[str]) -> Recipe:
    try:
        recipe = write.read_recipe(path, settings)
    except ConfigError as wrong:
        if any(re.match(r"[^=]+=[^\[{\"']*,", setting) for setting in settings):
            wrong.amend(fix=f"dray tune compares values of {', '.join(KEYS)}; dray sweep those of other keys")
        raise
    if recipe.train is None:
        raise ConfigError(
            "dray tune is for dray's own trainer", where=path, wanted="a recipe with [train] and [batch]",
            found="a recipe with [command], whose settings dray does not know",
            fix="dray sweep RECIPE KEY=VALUE,VALUE compares settings of a command",
        )  # fmt: skip
    return recipe


def _begun(
    recipe: Recipe, where: space.Place, folder: Path, keys: Sequence[str], given: Mapping[str, Sequence[Value]]
) -> tuple[tunings.Space, Tuning]:
    """The candidates, and a table without rows."""
    plan = where.first(recipe, folder)
    candidates = tunings.space(plan, given, keys)
    if not candidates.axes:
        raise ConfigError(
            "there is nothing to tune", wanted=f"a key of {', '.join(KEYS)} with several values",
            found=f"--keys and the settings leave none on {counted(plan.world.size, 'rank')}", fix="leave out --keys",
        )  # fmt: skip
    configuration = lookup.files(plan.recipe, where.facts).configuration or {}
    most, why = tunings.tolerance(plan.recipe, configuration, exact=study.PARITY)
    return candidates, Tuning(
        path="", recipe=recipe.model_dump(mode="json", exclude_unset=True), ranks=plan.world.size,
        where=space.text(plan, where), grid=len(list(candidates.every())), every=False, tolerance=most, why=why,
        start=dict(candidates.start.values), warm_up=_WARM_UP, steps=0,
    )  # fmt: skip
