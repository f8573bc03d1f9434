"""`dray sync`: send the metrics of a run to its trackers' servers."""

from __future__ import annotations

import os
from typing import Annotated, get_args

import typer

from dray.cli.chosen import Engine
from dray.cli.options import Run, Runs
from dray.config.training import Tracker
from dray.contract import files, image_tasks
from dray.contract.findings import ConfigError
from dray.runs import desk, hub
from dray.runs.store import find


def sync(
    run: Run = "",
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACKER", help="Tracker to send to; may be repeated. Default: train.trackers."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep sending until the run ends.")] = False,
    engine: Engine = "bare",
    runs: Runs = None,
) -> None:
    """Send a run's metrics to W&B, MLflow, Trackio and others, from a login node. Nothing is sent twice.

    dray sync 4711 --to mlflow
    """
    plan, paths = desk.trained(find(run, runs))
    if unknown := {*(to or ())} - {*get_args(Tracker)}:
        raise ConfigError(
            "--to has a wrong value", wanted=f"one of {', '.join(get_args(Tracker))}", found=", ".join(sorted(unknown))
        )
    named = [*(to or (plan.recipe.train.trackers if plan.recipe.train else ()))]
    names = [name for name in dict.fromkeys(named) if to or name not in _FILES]
    if not names:
        raise ConfigError(
            "the run has no tracker with a server",
            where=paths.run,
            wanted="a tracker in train.trackers, or --to",
            found=f"train.trackers = [{', '.join(named)}]",
            fix="--to wandb, even if the recipe does not name it",
        )
    if not files.is_own(paths.run):
        raise ConfigError(
            "the run is another user's: dray cannot record in it what it sent", where=paths.run,
            wanted="a run of yours", fix="let its owner sync it, or copy the run folder",
        )  # fmt: skip
    own = tuple(f"{name.partition('_')[0].upper()}_" for name in names)
    given = (*hub.passed(), *sorted(name for name in os.environ if name.startswith(own)))
    recipe = plan.recipe.model_copy(update={"env": {}, "pass_env": tuple(dict.fromkeys(given))})
    job = image_tasks.Sync(str(paths.run), plan.run, plan.recipe.name, names, follow)
    raise typer.Exit(desk.once(recipe, job, engine=engine, folder=paths.run, env={"HF_HUB_OFFLINE": "0"}))


_FILES = ("aim", "dvclive", "tensorboard")
