"""`dray why`: why a run failed."""

from __future__ import annotations

from pathlib import Path

import typer

from dray.cli.args import Json, Run, Runs, typed
from dray.cli.on import On, bring_back, hand_over
from dray.contract.findings import ConfigError
from dray.runs.report import archive
from dray.runs.report import why as reasons
from dray.runs.store import find


def why(
    context: typer.Context,
    run: Run = "",
    file: Path | None = None,
    bundle: bool = False,
    as_json: Json = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show why a run failed: the first failure, its cause and the fix. --bundle packs the files for a bug report.

    FILE: With --bundle: archive to write. Default: dray-why-RUN.tar.gz.
    --bundle: Pack plan, result, failures and the ends of logs, without secrets.

    dray why
    dray why 4711 report.tar.gz --bundle
    """
    if file and not bundle:
        raise ConfigError("FILE needs --bundle", found=str(file), fix="add --bundle, or leave out the FILE")
    if bundle and as_json:
        raise ConfigError("--json and --bundle exclude each other", fix="leave out one of them")
    if on and bundle:
        bring_back(on, ["why", run, "--bundle"], file, runs if typed(context, "runs") else None, archive.require_new)
        return
    hand_over(on)
    paths, report = reasons.of(find(run, runs))
    if not bundle:
        print(report.model_dump_json(indent=1) if as_json else reasons.text(report))
        return
    out = file or Path(f"dray-why-{paths.run.name}.tar.gz")
    made = archive.make(paths.run, out, why=reasons.text(report))
    print(archive.text(made))
