"""`dray why`: why a run failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.on import On, bring_back, hand_over
from dray.cli.options import Run, Runs, typed
from dray.contract.findings import ConfigError
from dray.runs import bundle as bundles
from dray.runs import why as reasons
from dray.runs.store import find


def why(
    context: typer.Context,
    run: Run = "",
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="With --bundle: archive to write. Default: dray-why-RUN.tar.gz."),
    ] = None,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Pack plan, result, failures and the ends of logs, without secrets.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show why a run failed: the first failure, its cause and the fix. --bundle packs the files for a bug report.

    dray why
    dray why 4711 report.tar.gz --bundle
    """
    if file and not bundle:
        raise ConfigError("FILE needs --bundle", found=str(file), fix="add --bundle, or leave out the FILE")
    if on and bundle:
        asked = ["why", run, "--bundle"]
        bring_back(on, asked, file, runs if typed(context, "runs") else None, bundles.require_new)
        return
    hand_over(on)
    paths, report = reasons.of(find(run, runs))
    if not bundle:
        print(report.model_dump_json(indent=1) if as_json else reasons.text(report))
        return
    made = bundles.make(paths, report, file or Path(f"dray-why-{paths.run.name}.tar.gz"))
    print(made.model_dump_json(indent=1) if as_json else bundles.text(made))
