"""`dray image convert`: convert between Dockerfile and Apptainer definition file, or list the packages of either."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dray.config import checkout
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images import convert as converting


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Dockerfile, or a definition file such as X.def.")],
    variant: Annotated[
        str, typer.Option(help="Write only the packages that FILE installs, for a layer of this image, such as cuda.")
    ] = "",
    context: Annotated[
        Path | None, typer.Option(help="Build context, from which FILE copies. Default: its folder.")
    ] = None,
    buildkit: Annotated[
        bool,
        typer.Option(
            "--buildkit", help="Write a definition file with which Apptainer 1.5 builds the Dockerfile as it is."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: standard output.")] = None,
    force: Annotated[bool, typer.Option(help="Replace the file that --out names.")] = False,
) -> None:
    """Convert a Dockerfile into an Apptainer definition file, or a definition file into a Dockerfile.

    dray image convert Dockerfile --out mine.def
    """
    if variant and buildkit:
        raise ConfigError(
            "--variant and --buildkit exclude each other", fix=f"dray image convert {file} --variant {variant}"
        )
    if out and out.exists() and file.exists() and out.samefile(file):
        raise ConfigError("--out would overwrite the file to convert", found=out, fix="--out ANOTHER_FILE")
    if variant:
        made = converting.packages(file, variant, checkout.root(), context)
    else:
        made = (converting.buildkit if buildkit else converting.convert)(file, context)
    for note in made.notes:
        print(f"dray: note: {note}", file=sys.stderr)
    if not out:
        print(made.text, end="")
        return
    try:
        files.write_atomic(out, made.text) if force else files.write_new(out, made.text)
    except FileExistsError:
        raise ConfigError("the file exists already", where=out, fix="--force replaces it") from None
    except OSError as refused:
        raise ConfigError("the file cannot be written", where=out, found=refused.strerror) from refused
    print(f"{out}\n{_next(context or file.parent, out, made.text, variant)}")


def _next(context: Path, out: Path, text: str, variant: str) -> str:
    """The command that uses the file."""
    if variant:
        return shlex.join(["dray", "image", "layer", variant, "--requirements", str(out), "--name", "NAME"])
    if any(line.startswith("FROM ") for line in text.splitlines()):
        return shlex.join(["docker", "build", "--file", str(out), str(context)])
    built = shlex.join(["apptainer", "build", "X.sif", os.path.relpath(out, context)])
    return built if context == Path() else f"cd {shlex.quote(str(context))} && {built}"
