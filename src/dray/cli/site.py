"""`dray site`: list, show, check and write the site files of clusters."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from dray.cli import candidates
from dray.cli.args import Json
from dray.cli.recipe import show_keys
from dray.config import load_toml, sites
from dray.config.site import Site
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.fitness import host, site_file

app = typer.Typer(no_args_is_help=True, help="List, show and check the site files of clusters, or write one.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="SITE", help="A site's name or file. Default: this cluster's.", autocompletion=candidates.sites
    ),
]
_ORDER = """
Where the image has a library too, Apptainer before 1.5, and SingularityCE, load the host's. Since 1.5 Apptainer loads
the image's. What the image's LD_LIBRARY_PATH has is loaded first by both."""


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Print every site, and which one this machine belongs to.

    dray site list --json
    """
    this = host.site()
    found = sorted(sites.files().items())
    if as_json:
        listed = [{"name": name, "about": sites.find(name).about, "file": str(path)} for name, path in found]
        print(json.dumps({"this": this.site.name, "reason": this.reason, "sites": listed}, indent=1))
        return
    for name, path in found:
        owner = " (your own file)" if path.parent == sites.user_folder() else ""
        print(f"{name:<14} {sites.find(name).about}{owner}")
    print(f"\nthis machine: {this.site.name} ({this.reason})")


@app.command()
def show(
    site: Name = "",
    image: Annotated[
        str, typer.Option(metavar="FILE|VARIANT", help="Instead, check whether the host's libraries fit this image.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Print the values of a site, each with its reason and source.

    dray site show lumi
    dray site show lumi --image rocm
    """
    chosen = host.site(site).site
    if image:
        _compare(chosen, image)
        return
    if as_json:
        print(chosen.model_dump_json(indent=1))
        return
    print(f"{chosen.name}: {chosen.about}")
    skipped = {"name", "about", "binds", "env", "fabric", "why"}
    rows = [(key, getattr(chosen, key), chosen.why.get(key, "")) for key in Site.model_fields if key not in skipped]
    rows += [(f"fabric.{key}", value, "") for key, value in chosen.fabric.model_dump().items()]
    for key, value, why in rows:
        if value:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"\n{key} = {shown}" + (f"\n    {why}" if why else ""))
    if chosen.why.get("fabric"):
        print(f"    {chosen.why['fabric']}")
    for bind in chosen.binds:
        access = ("read-write" if bind.write else "read-only") + ("" if bind.required else ", if it exists")
        print(f"\nbind {bind.path} ({access})\n    {bind.why}" + (f" ({bind.source})" if bind.source else ""))
    for variable in chosen.env:
        only = "" if variable.nodes == "any" else f" (jobs of {variable.nodes} node{'s' * (variable.nodes != 'one')})"
        source = f" ({variable.source})" if variable.source else ""
        print(f"\nenv {variable.name}={variable.value}{only}\n    {variable.why}{source}")


@app.command()
def keys(
    name: Annotated[str, typer.Argument(metavar="[KEY]", help="A table or a key, such as fabric. Default: all.")] = "",
    as_json: Json = False,
) -> None:
    """Print the keys of a site file, or of one of its tables, each with its type, default and meaning.

    dray site keys fabric
    """
    show_keys(Site, name, as_json=as_json)


@app.command()
def check(
    site: Annotated[
        str, typer.Argument(metavar="[SITE]", help="One site. Default: all.", autocompletion=candidates.sites)
    ] = "",
) -> None:
    """Validate site files, and print every error.

    dray site check lumi
    """
    names = [site] if site else sorted(sites.files())
    errors = []
    for name in names:
        try:
            valid = sites.find(name)
        except DrayError as error:
            errors.append(str(error))
            continue
        unexplained = _unexplained(valid)
        print(f"{name}: ok" + (f"; no reason given for {', '.join(unexplained)}" if unexplained else ""))
    if errors:
        raise ConfigError(f"{len(errors)} of {len(names)} site files are not valid", found="\n".join(errors))


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="The site's name. Default: Slurm's name of the cluster.")
    ] = "",
    show_only: Annotated[bool, typer.Option("--print", help="Print the site file; write nothing.")] = False,
) -> None:
    """Write a site file from what this machine shows. Run it on a login node or, better, on a compute node.

    dray site new my-cluster --print
    """
    probed = site_file.probe(os.environ)
    name = name or re.sub("[^a-z0-9._-]", "-", (probed.cluster or socket.gethostname()).lower())
    content = site_file.render(name, probed)
    if show_only:
        print(content, end="")
        return
    load_toml.validate(Site, tomllib.loads(content), what="the site file")  # before every verb reads it
    try:
        path = site_file.write(sites.user_folder(), name, content)
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        other = (
            "dray site new ANOTHER-NAME, or remove it"
            if exists
            else f"make {sites.user_folder()} writable, with free space"
        )
        raise ConfigError(
            "cannot write the site file",
            where=sites.user_folder() / f"{name}.toml",
            found="it exists already" if exists else error.strerror,
            fix=f"{other}; dray site new --print shows the new content",
        ) from error
    print(f"{path}\n{content}", end="")


def _unexplained(site: Site) -> list[str]:
    explained = {"name", "about", "why", "binds", "env", "engine", *site.why}
    return [key for key in Site.model_fields if key in site.model_fields_set - explained]


def _compare(site: Site, image: str) -> None:
    from dray.fitness import host_libraries  # noqa: PLC0415  it loads the Docker SDK, for which no TAB should wait

    if site.fabric.strategy != "host":
        print(f"{site.name} binds no libraries of the host (fabric.strategy = {site.fabric.strategy})")
        return
    compared = host_libraries.compare(site, image)
    print(f"{'library of the host':<28} {'also in the image':<40} verdict")
    for library in compared.libraries:
        maybe = (f"{one} (the driver may have it)" for one in library["unresolved"])
        verdict = "; ".join([*library["problems"], *maybe]) or "fits"
        copy = library["path"] if library["path"] == site.fabric.image_plugin else library["in_image"] or "no"
        print(f"{Path(library['path']).name:<28} {copy:<40} {verdict}")
    print(_ORDER)
    if not compared.fits:
        missing = [f"{pattern} does not exist on this machine" for pattern in compared.missing]
        found = "\n".join(missing) or "see the verdicts above"
        raise UnfitError("the host's libraries do not fit this image", found=found, fix="see docs/sites.md")
