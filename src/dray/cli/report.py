"""`dray report`: one page about a run, or about several side by side; or its metrics for its trackers' servers."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Annotated, get_args

import typer

from dray import __version__
from dray.cli.args import Runs, typed
from dray.cli.on import On, bring_back, hand_over
from dray.config.training import Tracker
from dray.contract import files, image_tasks
from dray.contract.findings import ConfigError
from dray.runs import one_off_job
from dray.runs.report import sections
from dray.runs.report.data import gather
from dray.runs.store import find

_MOST = 24  # colours and dashes that can be told apart
_MADE = b"<footer><p>Made by dray "
_LOCAL = ("aim", "dvclive", "tensorboard")
"""Trackers without a server."""


def report(
    context: typer.Context,
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs: folders, names or their beginnings, or job numbers. Default: the newest."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write, .html. Default: dray-report-RUN.html."),
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="Send the run's metrics to its trackers' servers instead; nothing twice.")
    ] = False,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACKER", help="With --sync: send to it; may be repeated. Default: train.trackers."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="With --sync: keep sending until the run ends.")
    ] = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Write a report of a run, or of several side by side: one HTML page that needs no network.

    With --sync, send a run's metrics to W&B, MLflow, Trackio and others, from a login node.

    dray report 4711 4712 --out compared.html
    dray report 4711 --sync --to mlflow
    """
    if (to or follow) and not sync:
        raise ConfigError("--to and --follow belong to --sync", fix="add --sync")
    if sync:
        if named and len(named) > 1:
            raise ConfigError("--sync takes one run", found=" ".join(map(ascii, named)), fix="name one RUN")
        hand_over(on)
        raise typer.Exit(_sync(find(named[0] if named else "", runs), to or [], follow=follow))
    if out and out.suffix != ".html":
        raise ConfigError(
            "--out has a wrong ending", wanted="a FILE that ends in .html", found=ascii(str(out)),
            fix=f"--out={shlex.quote(str(out.with_suffix('.html')) if out.name else 'report.html')}",
        )  # fmt: skip
    if on:
        bring_back(on, ["report", *(named or [])], out, runs if typed(context, "runs") else None, _require)
        return
    folders = list(dict.fromkeys(find(name, runs) for name in named or [""]))
    if len(folders) > _MOST:
        raise ConfigError("too many runs for one report", wanted=f"at most {_MOST}", found=str(len(folders)))
    gathered = [gather(folder) for folder in folders]
    target = out or Path(f"dray-report-{gathered[0].told.run if len(gathered) == 1 else 'runs'}.html")
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
    """Refuse a FILE that dray did not write: a mistyped option must not cost a recipe."""
    if not os.path.lexists(file):
        return
    found = "a file that dray did not write"
    try:
        if _MADE in files.end(file, 1024)[0]:
            return
    except OSError as error:
        found = error.strerror or str(error)
    raise ConfigError(
        "the report would replace a file that is not a report",
        where=file,
        wanted="a new file, or an older report of dray",
        found=found,
        fix="another name, such as --out=dray-report.html",
    )


def _sync(run: Path, to: list[str], *, follow: bool) -> int:
    """Send what was not sent before; return the exit code."""
    plan, paths = one_off_job.trained(run)
    train = plan.recipe.train
    names = to or [name for name in (train.trackers if train else ()) if name not in _LOCAL]
    if not names or not {*names} <= {*get_args(Tracker)}:
        raise ConfigError(
            "--sync needs a tracker with a server",
            where=paths.run,
            wanted=f"one of {', '.join(get_args(Tracker))} in train.trackers, or by --to",
            found=", ".join(names) or f"train.trackers = [{', '.join(train.trackers if train else ())}]",
            fix="--to wandb, even if the recipe does not name it",
        )
    if not files.is_own(paths.run):
        raise ConfigError(
            "the run is another user's: dray cannot record in it what it sent", where=paths.run,
            wanted="a run of yours", fix="let its owner sync it, or copy the run folder",
        )  # fmt: skip
    own = tuple(f"{name.partition('_')[0].upper()}_" for name in names)
    given = (*one_off_job.hub_variables(), *sorted(name for name in os.environ if name.startswith(own)))
    recipe = plan.recipe.model_copy(update={"env": {}, "pass_env": tuple(dict.fromkeys(given))})
    job = image_tasks.Sync(str(paths.run), plan.run, plan.recipe.name, names, follow)
    return one_off_job.once(recipe, job, engine="bare", folder=paths.run, env={"HF_HUB_OFFLINE": "0"})
