"""`dray image layer`: add packages of your own to an image, in a small SIF beside it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from dray.config import dray_home
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images.layers import make


def layer(
    variant: Annotated[str, typer.Argument(help="The image that the packages are added to, such as cuda.")],
    packages: Annotated[
        list[str] | None,
        typer.Option("--pip", metavar="PACKAGE", help="Package as pip names it, such as 'trl>=1.0'; may be repeated."),
    ] = None,
    requirements: Annotated[Path | None, typer.Option(help="A requirements.txt with the packages.")] = None,
    lock: Annotated[
        Path | None, typer.Option(help="Lock file of an earlier layer: take the same files again, without resolving.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name for recipes. Default: the names of its packages.")] = "",
    wheels: Annotated[
        Path | None, typer.Option(help="Folder with wheels of your own, in addition to the fetched ones.")
    ] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Resolve again, to the newest fitting versions.")] = False,
) -> None:
    """Add packages to an image without building it again.

    dray image layer cuda --pip trl --pip wandb --name mine
    """
    asked = [line.strip() for line in packages or []]
    if requirements:
        lines = files.text(requirements, "the requirements").splitlines()
        asked += [line for raw in lines if (line := raw.split(" #")[0].strip()) and not line.startswith("#")]
    if bool(asked) == bool(lock):
        problem = "--lock already names the layer's packages" if lock else "no package for the layer was named"
        raise ConfigError(
            problem, wanted="--pip or --requirements, or --lock alone", fix=f"dray image layer {variant} --pip trl"
        )
    if odd := [line for line in asked if not line or line.startswith("-") or "://" in line or not line.isprintable()]:
        raise ConfigError(
            "a layer takes packages by name only, since it is locked by hashes",
            wanted="a line such as trl or trl==1.0",
            found=ascii(odd[0]),
            fix="build a wheel of the package, and give the wheel's folder: --wheels FOLDER",
        )
    if wheels and not wheels.is_dir():
        raise ConfigError("the folder of wheels does not exist", where=wheels)
    path, made = make.make(
        dray_home.root(build=True), variant, asked, name=name, locked=lock,
        own_wheels=wheels and wheels.absolute(), upgrade=upgrade,
    )  # fmt: skip
    key = path.stem.removeprefix(f"dray-{variant}-")
    for package, version in made.packages.items():
        print(f"  {package} {version}")
    print(f"{path}  {made.sif.size / 1e6:.1f} MB  sha256:{made.sif.sha256}")
    print(f'in a recipe: image = "{variant}", layer = "{key}"')
    lock_file = shlex.quote(os.path.relpath(path.with_suffix(".lock")))
    print(f"to build the same bytes again: dray image layer {variant} --lock {lock_file}")
