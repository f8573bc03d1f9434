"""`dray init`: a checkout without git."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.config import checkout


def init(folder: Annotated[Path, typer.Argument(help="A new or empty folder.", show_default=False)]) -> None:
    """Write a folder with containers/, recipes/, slurm/ and the Makefile, to build images and submit from.

    dray init my-runs
    """
    checkout.write(folder)
    print(f"{folder}: recipes/ to train, slurm/ to submit, containers/ to build. Next: cd there, and make help")
