"""Sites: list, show, check and write the site files of clusters; and `dray doctor`, a check of this machine."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import Annotated

import typer

from dray.cli import args
from dray.cli.args import Json, complete_sites
from dray.config import dray_home, sites
from dray.config.load_toml import parse_toml, validate
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError
from dray.fitness import network_and_site

site_verbs = typer.Typer()

Name = Annotated[
    str,
    typer.Argument(metavar="SITE", help="A site's name or file.", autocompletion=complete_sites),
]


@site_verbs.command("list")
def list_(as_json: Json = False) -> None:
    """Print every site, and which one this machine belongs to.

    dray site list --json
    """
    this = network_and_site.site()
    known = [{"name": name, "about": sites.find(name).about, "file": str(path)} for name, path in sites.files().items()]
    if as_json:
        print(json.dumps({"this": this.site.name, "reason": this.reason, "sites": known}, indent=1))
        return
    for site in known:
        owner = " (your own file)" if site["file"].startswith(str(sites.user_folder())) else ""
        print(f"{site['name']:<14} {site['about']}{owner}")
    print(f"\nthis machine: {this.site.name} ({this.reason})")


@site_verbs.command()
def show(
    site: Name = "",
    as_json: Json = False,
) -> None:
    """Print the values of a site, by default of this cluster's, each with its reason and source.

    dray site show lumi
    """
    chosen = network_and_site.site(site).site
    if as_json:
        print(chosen.model_dump_json(indent=1))
        return
    print(f"{chosen.name}: {chosen.about}")
    values = chosen.model_dump(exclude={"name", "about", "binds", "env", "fabric", "why"})
    values |= {f"fabric.{key}": value for key, value in chosen.fabric.model_dump().items()}
    for key, value in values.items():
        if value:
            _entry(f"{key} = {json.dumps(value, ensure_ascii=False)}", chosen.why.get(key.partition(".")[0], ""))
    for bind in chosen.binds:
        access = "read-write" if bind.write else "read-only"
        needed = "" if bind.required else ", if it exists"
        _entry(f"bind {bind.path} ({access}{needed})", bind.why, bind.source)
    for variable in chosen.env:
        jobs = "" if variable.nodes == "any" else f" (jobs of {variable.nodes} node(s))"
        _entry(f"env {variable.name}={variable.value}{jobs}", variable.why, variable.source)


def _entry(value: str, why: str, source: str = "") -> None:
    print(f"\n{value}")
    if why:
        print(f"    {why} ({source})" if source else f"    {why}")


@site_verbs.command()
def keys(
    key: str = "",
) -> None:
    """Print the keys of a site file, or of one of its tables, each with its type, default and meaning.

    KEY: A table or a key, such as fabric. Default: all.

    dray site keys fabric
    """
    from dray.cli.recipe import show_keys

    show_keys(Site, key)


@site_verbs.command()
def check(site: Name = "") -> None:
    """Validate a site file, by default all, and print every error.

    dray site check lumi
    """
    names = [site] if site else sorted(sites.files())
    errors = []
    for name in names:
        try:
            sites.find(name)
            print(f"{name}: ok")
        except DrayError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(f"{len(errors)} of {len(names)} site files are not valid", found="\n".join(errors))


@site_verbs.command()
def new(
    name: str = "",
) -> None:
    """Write a site file from what this machine shows. Run it on a login node or, better, on a compute node.

    NAME: The site's name. Default: Slurm's name of the cluster.

    dray site new my-cluster
    """
    from dray.cli.recipe import write_new
    from dray.fitness import new_site

    probed = new_site.probe(os.environ)
    name = name or re.sub("[^a-z0-9._-]", "-", (probed.cluster or socket.gethostname()).lower())
    content = new_site.render(name, probed)
    validate(Site, parse_toml(content), what="the site file")  # before every verb reads it
    path = sites.user_folder() / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_new(path, content, "the site file", fix="dray site new ANOTHER-NAME, or remove it")
    print(f"{path}\n{content}", end="")


def doctor(
    site: args.Site = "",
    build: str = "",
    as_json: Json = False,
) -> None:
    """Check whether runs can start on this machine or node, and print a fix for each problem; exit code 69 if any.

    --build VARIANT: Check what a build of this image needs.

    dray doctor --json
    dray doctor --build cuda
    """
    from dray.fitness import build as builds
    from dray.fitness import doctor as checks

    if build:
        findings = builds.check(builds.Build(checkout=dray_home.root(build=True), variant=build))
    else:
        findings = checks.check(network_and_site.site(site))
    if as_json:
        print(json.dumps([finding.data() for finding in findings], indent=1))
    else:
        print("\n".join(finding.line() for finding in findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(max(finding.code for finding in findings) if build else exit_codes.UNFIT)
