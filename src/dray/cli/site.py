"""`dray site`: list, show, check and write the site files of clusters, and check the variables of a run there."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import Annotated

import typer

from dray.cli import candidates
from dray.cli.args import Arguments, GpusPerNode, Json, Nodes, Ranks, chosen
from dray.cli.args import Site as OfRun
from dray.cli.recipe import show_keys, write_new
from dray.config import dray_home, sites
from dray.config.load_toml import parse_toml, validate
from dray.config.site import Site
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError, counted
from dray.fitness import host, site_file

app = typer.Typer(no_args_is_help=True, help="List, show, check and write the site files of clusters.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="SITE", help="A site's name or file. Default: this cluster's.", autocompletion=candidates.sites
    ),
]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Print every site, and which one this machine belongs to.

    dray site list --json
    """
    this = host.site()
    known = []
    for name, path in sorted(sites.files().items()):
        known.append({"name": name, "about": sites.find(name).about, "file": str(path)})
    if as_json:
        print(json.dumps({"this": this.site.name, "reason": this.reason, "sites": known}, indent=1))
        return
    own = str(sites.user_folder())
    for site in known:
        owner = " (your own file)" if site["file"].startswith(own) else ""
        print(f"{site['name']:<14} {site['about']}{owner}")
    print(f"\nthis machine: {this.site.name} ({this.reason})")


@app.command()
def show(
    site: Name = "",
    as_json: Json = False,
) -> None:
    """Print the values of a site, each with its reason and source.

    dray site show lumi
    """
    chosen = host.site(site).site
    if as_json:
        print(chosen.model_dump_json(indent=1))
        return
    print(f"{chosen.name}: {chosen.about}")
    values = chosen.model_dump(exclude={"name", "about", "binds", "env", "fabric", "why"})
    values |= {f"fabric.{key}": value for key, value in chosen.fabric.model_dump().items()}
    for key, value in values.items():
        if value:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            why = chosen.why.get(key.partition(".")[0])
            print(f"\n{key} = {shown}" + (f"\n    {why}" if why else ""))
    for bind in chosen.binds:
        access = "read-write" if bind.write else "read-only"
        access += "" if bind.required else ", if it exists"
        print(f"\nbind {bind.path} ({access})\n    {bind.why} ({bind.source})".removesuffix(" ()"))
    for variable in chosen.env:
        jobs = "" if variable.nodes == "any" else f" (jobs of {variable.nodes} node(s))"
        name = f"{variable.name}={variable.value}{jobs}"
        print(f"\nenv {name}\n    {variable.why} ({variable.source})".removesuffix(" ()"))


@app.command()
def keys(
    key: str = "",
) -> None:
    """Print the keys of a site file, or of one of its tables, each with its type, default and meaning.

    KEY: A table or a key, such as fabric. Default: all.

    dray site keys fabric
    """
    show_keys(Site, key)


@app.command()
def check(site: Name = "") -> None:
    """Validate a site file, or all, and print every error.

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
        explained = {"name", "about", "why", "binds", "env", "engine", *valid.why}
        unexplained = [key for key in Site.model_fields if key in valid.model_fields_set - explained]
        print(f"{name}: ok" + (f"; no reason given for {', '.join(unexplained)}" if unexplained else ""))
    if errors:
        raise ConfigError(f"{len(errors)} of {len(names)} site files are not valid", found="\n".join(errors))


@app.command()
def new(
    name: str = "",
    show_only: Annotated[bool, typer.Option("--print", help="Print the site file; write nothing.")] = False,
) -> None:
    """Write a site file from what this machine shows. Run it on a login node or, better, on a compute node.

    NAME: The site's name. Default: Slurm's name of the cluster.

    dray site new my-cluster --print
    """
    probed = site_file.probe(os.environ)
    name = name or re.sub("[^a-z0-9._-]", "-", (probed.cluster or socket.gethostname()).lower())
    content = site_file.render(name, probed)
    if not show_only:
        validate(Site, parse_toml(content), what="the site file")  # before every verb reads it
        path = sites.user_folder() / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        fix = "dray site new ANOTHER-NAME, or remove it; dray site new --print shows the new content"
        write_new(path, content, "the site file", fix=fix)
        print(path)
    print(content, end="")


@app.command()
def env(
    context: typer.Context,
    arguments: Arguments = None,
    nodes: Nodes = None,
    ranks: Ranks = None,
    gpus_per_node: GpusPerNode = 0,
    site: OfRun = "",
    as_json: Json = False,
) -> None:
    """Print which environment variables of a run slow it down, make it hang or have no effect; exit code 78 if any
    is wrong.

    dray site env recipes/smoke-cpu.toml --site lumi -N4 image=rocm
    """
    from dray.fitness import variables  # noqa: PLC0415  it loads the planner, for which no other verb here should wait
    from dray.images import inputs  # noqa: PLC0415
    from dray.runs import login, prepare  # noqa: PLC0415
    from dray.runs.store import RunPaths  # noqa: PLC0415

    root = dray_home.root()
    settings = chosen(arguments, context, ranks, gpus_per_node).recipe()
    facts, choice = login.facts(settings, nodes, gpus_per_node, site, ranks=ranks, options=(), gpu_memory=None)
    plan = prepare.decide(settings, facts, choice, RunPaths(root / "runs" / "run"))
    findings = variables.check(plan, os.environ, inputs.environment_of(root, inputs.image(root, plan.recipe.image)))
    levels = [finding.level for finding in findings]
    if as_json:
        print(json.dumps([finding.data() for finding in findings], indent=1))
    else:
        for finding in findings:
            print(finding.line())
        counts = ", ".join(counted(levels.count(level), level) for level in ("error", "warning", "note"))
        print(f"{plan.reasons['site']}; {counted(len(plan.env), 'variable')} inside: {counts}")
    if "error" in levels:
        raise typer.Exit(exit_codes.CONFIG)
