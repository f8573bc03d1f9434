"""`dray report`: one page about a run, or about several side by side; or its metrics for its trackers' servers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, get_args

import typer

from dray import __version__
from dray.cli import candidates
from dray.cli.args import Runs, typed
from dray.cli.on import On, bring_back, hand_over
from dray.config.training import Tracker
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.contract.trainer import image_tasks
from dray.runs import local
from dray.runs.report import sections
from dray.runs.report.data import gather
from dray.runs.store import find, require_own

_LOCAL = ("tensorboard",)
"""Trackers without a server."""


def report(
    context: typer.Context,
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=candidates.runs,
            help="Runs: folders, names or their beginnings, or job numbers. Default: the newest.",
        ),
    ] = None,
    out: Path | None = None,
    sync: bool = False,
    to: list[str] | None = None,
    follow: bool = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Write a report of a run, or of several side by side: one HTML page that needs no network.

    With --sync, send a run's metrics to W&B, MLflow, Trackio and others, from a login node.

    --out FILE: File to write. Default: dray-report-RUN.html; of several runs dray-report-runs.html.
    --sync: Send the run's metrics to its trackers' servers instead; nothing twice.
    --to TRACKER: With --sync: send to it; may be repeated. Default: train.trackers.
    --follow, -f: With --sync: keep sending until the run ends.

    dray report 4711 4712 --out compared.html
    dray report 4711 --sync --to mlflow
    """
    named = named or [""]
    misplaced = out if sync else to or follow
    if misplaced:
        raise ConfigError("--to and --follow belong to --sync, and --out does not", fix="dray report RUN --sync")
    if sync:
        hand_over(on)
        raise typer.Exit(max(_sync(find(name, runs), to or [], follow=follow) for name in named))
    if on:
        bring_back(on, ["report", *filter(None, named)], out, runs if typed(context, "runs") else None, _require)
        return
    gathered = [gather(folder) for folder in dict.fromkeys(find(name, runs) for name in named)]
    target = out or Path(f"dray-report-{gathered[0].explained.run if len(gathered) == 1 else 'runs'}.html")
    _require(target)
    made = time.strftime(f"Made by dray {__version__} at %Y-%m-%dT%H:%M:%SZ.", time.gmtime())
    try:
        files.write_atomic(target, sections.page(sections.document(gathered, made)))
    except OSError as error:
        raise ConfigError(
            "the report cannot be written", where=target, found=error.strerror or error, fix="--out=FILE"
        ) from error
    print(f"report: {target.absolute()}")


def _require(file: Path) -> None:
    """Refuse another file than a page: a mistyped option must not cost a recipe."""
    if file.suffix != ".html":
        raise ConfigError("a report is a page of HTML", found=f"--out={file}", fix="--out=dray-report.html")


def _sync(run: Path, to: list[str], *, follow: bool) -> int:
    """Send what was not sent before; return the exit code."""
    require_own(run)  # what was sent is recorded in it
    plan, paths = local.trained_run(run)
    trackers = plan.recipe.train.trackers if plan.recipe.train else ()
    names = list(dict.fromkeys(to or [name for name in trackers if name not in _LOCAL]))
    known = get_args(Tracker)
    if not names or not {*names} <= {*known}:
        raise ConfigError(
            "--sync needs a tracker with a server",
            where=paths.run,
            wanted=f"one of {', '.join(known)} in train.trackers, or by --to",
            found=", ".join(names) or f"train.trackers = [{', '.join(trackers)}]",
            fix="--to wandb, even if the recipe does not name it",
        )
    prefixes = tuple(f"{name.partition('_')[0].upper()}_" for name in names)
    given = (*local.hub_variables(), *(name for name in os.environ if name.startswith(prefixes)))
    recipe = plan.recipe.model_copy(update={"env": {}, "pass_env": given})
    job = image_tasks.Sync(str(paths.run), plan.run, plan.recipe.name, names, follow)
    return local.run_in_image(recipe, job, engine="bare", folder=paths.run, env={"HF_HUB_OFFLINE": "0"})
