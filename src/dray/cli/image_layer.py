"""`dray image layer`: packages of a user's own, in a small SIF beside the image."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from dray.config import checkout
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images.layers import make


def layer(
    variant: Annotated[str, typer.Argument(help="The image that the packages are added to, such as cuda.")],
    packages: Annotated[
        list[str] | None, typer.Option("--pip", metavar="PACKAGE", help="As pip takes it, such as trl or 'trl>=1.0'.")
    ] = None,
    requirements: Annotated[Path | None, typer.Option(help="A requirements.txt.")] = None,
    lock: Annotated[
        Path | None, typer.Option(help="The lock of a layer: the same files again, nothing resolved.")
    ] = None,
    name: Annotated[str, typer.Option(help="Its name in recipes; else that of its only package.")] = "",
    wheels: Annotated[
        Path | None, typer.Option(help="A folder of wheels of your own, besides what is fetched.")
    ] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Resolve again, to the newest versions that fit.")] = False,
) -> None:
    """Add packages to an image without building it again: dray image layer cuda --pip trl --pip wandb --name rl.

    dray image layer cuda --pip trl --pip wandb --name mine
    """
    asked = [line.strip() for line in packages or []]
    if requirements:
        lines = files.text(requirements, "the requirements").splitlines()
        asked += [line for raw in lines if (line := raw.split(" #")[0].strip()) and not line.startswith("#")]
    if bool(asked) == bool(lock):
        problem = "--lock already says what the layer holds" if lock else "a layer of nothing"
        raise ConfigError(
            problem, wanted="--pip or --requirements, or --lock", fix=f"dray image layer {variant} --pip trl"
        )
    if odd := [line for line in asked if not line or line.startswith("-") or "://" in line or not line.isprintable()]:
        raise ConfigError(
            "a layer is locked by hashes, and takes packages by name",
            wanted="a line such as trl or trl==1.0",
            found=ascii(odd[0]),
            fix="build a wheel of it, and name the wheel's folder: --wheels FOLDER",
        )
    if wheels and not wheels.is_dir():
        raise ConfigError("the folder of wheels does not exist", where=wheels)
    path, made = make.make(
        checkout.root(build=True), variant, asked, name=name, locked=lock,
        own_wheels=wheels and wheels.absolute(), upgrade=upgrade,
    )  # fmt: skip
    key = path.stem.removeprefix(f"dray-{variant}-")
    for package, version in made.packages.items():
        print(f"  {package} {version}")
    print(f"{path}  {made.sif.size / 1e6:.1f} MB  sha256:{made.sif.sha256}")
    print(f'in a recipe: image = "{variant}", layer = "{key}"')
    lock_file = shlex.quote(os.path.relpath(path.with_suffix(".lock")))
    print(f"the same bytes again: dray image layer {variant} --lock {lock_file}")
