"""`dray image`: build the image that everything else runs in."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from dray import checkout
from dray.errors import ConfigError
from dray.images import build as make

app = typer.Typer(help="Build the image that a run starts from.", no_args_is_help=True)


class Format(enum.StrEnum):
    """What comes out."""

    SIF = "sif"
    DOCKER = "docker"


@app.callback()
def _image() -> None:
    """Keep `build` a verb of its own while it is the only one."""


@app.command("build")
def build(
    variant: Annotated[str, typer.Argument(help="A folder of containers/, such as cpu.")],
    kind: Annotated[Format, typer.Option("--format", help="A SIF for Apptainer, or a Docker image.")] = Format.SIF,
    base: Annotated[
        str,
        typer.Option(
            envvar="DRAY_IMAGE_BASE",
            help="An image reference, or the tar of a root filesystem; else that of image.toml.",
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Where the SIF goes; else build/dray-VARIANT.sif.")] = None,
) -> None:
    """Build build/dray-VARIANT.sif, or the Docker image dray:VARIANT."""
    root = checkout.root()
    if kind is Format.SIF:
        print(make.as_sif(root, variant, base=base or None, out=out))
    elif out:
        raise ConfigError("--out is for --format sif", found=out, fix="docker save writes a Docker image to a file")
    else:
        print(make.as_docker(root, variant, base=base or None))
