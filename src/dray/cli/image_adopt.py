"""`dray image adopt`: use an image that somebody else made."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dray.cli.args import Site
from dray.config import dray_home
from dray.contract.findings import DrayError
from dray.fitness import host, host_libraries
from dray.images import adopt as adopting

_SOURCES = "A SIF, docker://..., oras://..., oci:FOLDER, oci-archive:FILE or docker-archive:FILE."


def adopt(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help=_SOURCES,
        ),
    ],
    name: Annotated[str, typer.Option(help="Name for recipes. Default: the source's own name.")] = "",
    site: Site = "",
    force: Annotated[bool, typer.Option(help="Replace an adopted image with the same name.")] = False,
) -> None:
    """Start somebody else's image once and record what is in it, so that jobs can use it where it is.

    dray image adopt theirs.sif --name theirs
    """
    root = dray_home.root(build=True)
    made = adopting.adopt(root, source, name=name, force=force, say=lambda line: print(line, file=sys.stderr))
    width = max(map(len, (*made.versions, "digest")))
    print(f"{made.file}\n{'digest':<{width}}  {made.digest}")
    for key, version in made.versions.items():
        print(f"{key:<{width}}  {version}")
    if made.brought:
        print(f"dray adds, since the image lacks them: {', '.join(made.brought)}")
    for lack in made.lacks:
        print(f"dray: note: dray's own trainer needs {lack}", file=sys.stderr)
    _compare(str(made.file), site)
    print(f'in a recipe:\nimage = "{made.variant}"\nadopted = "{made.file.parent.name.removeprefix("dray-")}"')


def _compare(image: str, named: str) -> None:
    """Compare the image with the libraries that the site binds, if it binds any."""
    site = host.site(named).site
    if site.fabric.strategy != "host":
        return
    try:
        found = host_libraries.compare(site, image)
    except DrayError as error:
        print(f"dray: warning: {error}", file=sys.stderr)
        return
    verdict = (
        "fit" if found.fits else f"do not fit, or are not on this machine: dray site show {site.name} --image {image}"
    )
    print(f"the libraries that site {site.name} binds {verdict}")
