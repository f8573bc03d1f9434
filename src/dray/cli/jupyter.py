"""`dray jupyter`: JupyterLab in the image."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dray.cli.enter import Node
from dray.cli.options import Run, Runs
from dray.contract import node as machine
from dray.contract.findings import ConfigError
from dray.runs import enter
from dray.runs import jupyter as lab
from dray.runs.status import status
from dray.runs.store import find, require_own


def jupyter(
    run: Run = "",
    image: Annotated[
        str, typer.Option(metavar="FILE|VARIANT", help="Start it on this machine in this image, instead of in a run.")
    ] = "",
    node: Node = "",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="First port to try; only this machine can reach it.")
    ] = 8888,
    runs: Runs = None,
) -> None:
    """Start JupyterLab in the container of a run, or in an image on this machine, and print how to reach it.

    dray jupyter 4711 --node 1
    dray jupyter --image cuda
    """
    if image and (run or node):
        raise ConfigError(
            "--image is for this machine, not for a run", found=run or f"--node {node}", fix="leave one of them out"
        )
    state = None if image else status(require_own(find(run, runs)))
    parent = enter.plan_of(state)[1].folder if state else machine.SCRATCH
    try:
        with lab.private(parent) as folder:
            place = lab.in_run(state, node, folder) if state else lab.in_image(image, folder)
            lab.serve(place, port, say=lambda line: print(line, flush=True), show_token=sys.stdout.isatty())
    except KeyboardInterrupt:
        print("JupyterLab has ended")
