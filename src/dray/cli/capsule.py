"""`dray capsule`: what is needed to repeat a run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.options import Run, Runs
from dray.contract import exit_codes
from dray.contract.findings import DrayError
from dray.runs import capsule, pack, verify
from dray.runs.store import RunPaths, attempts, last_attempt
from dray.runs.write import read

app = typer.Typer(no_args_is_help=True, help="Show, verify or pack a run's capsule: what is needed to repeat the run.")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(run: Run = "", as_json: AsJson = False, runs: Runs = None) -> None:
    """Show the capsule of a run, or a packed capsule: image, code, nodes, data.

    dray capsule show my.tar.gz
    """
    with pack.opened(run, runs) as folder:
        paths, plan = last_attempt(folder), None
        with suppress(DrayError):
            plan = read(paths)
        made = capsule.read(paths) if plan is None else capsule.of(paths, plan)
    print(made.model_dump_json(indent=1) if as_json else "\n".join(verify.page(made, plan)))


@app.command("verify")
def check(run: Run = "", as_json: AsJson = False, runs: Runs = None) -> None:
    """Check whether each file still is what the capsule recorded; exit code 1 if one is not.

    dray capsule verify 4711
    """
    with pack.opened(run, runs) as folder:
        last = last_attempt(folder)
        # An attempt of an older dray may have none.
        every = [RunPaths(folder, number) for number in attempts(folder)] or [last]
        found = [verify.verify(one) for one in every if one.capsule.exists() or one.attempt == last.attempt]
    if as_json:
        print(json.dumps([one.model_dump() for one in found], indent=1))
    else:
        print("\n".join(line for one in found for line in verify.verified(one)))
    raise typer.Exit(exit_codes.DONE if all(one.same for one in found) else exit_codes.FAILED)


@app.command("pack")
def hand_on(
    run: Run = "",
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Archive to write. Default: dray-capsule-RUN.tar.gz.")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = None,
) -> None:
    """Pack a run's capsule into one archive for others, without secrets and checkpoints.

    dray capsule pack 4711
    """
    with pack.opened(run, runs) as folder:
        whole = last_attempt(folder).run
        made = pack.make(whole, file or Path(f"dray-capsule-{whole.name}.tar.gz"))
    print(made.model_dump_json(indent=1) if as_json else pack.text(made))
