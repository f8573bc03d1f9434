"""`dray site`: what clusters ask for and offer."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from dray import process
from dray.cli.recipe import show_keys
from dray.config import checkout, model, sites
from dray.config.image import ACCELERATORS
from dray.config.site import Site
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.fitness import site_file
from dray.images import store
from dray.runs import submit

app = typer.Typer(no_args_is_help=True, help="Clusters: list, show and check their files, or write one.")

Name = Annotated[str, typer.Argument(metavar="SITE", help="A site's name or file; else the one that this is.")]


@app.command("list")
def list_() -> None:
    """Print every site, and which one this is."""
    here, why = sites.detect(submit.cluster(), socket.gethostname())
    for name, path in sorted(sites.known().items()):
        whose = " (your own file)" if path.parent == sites.own() else ""
        print(f"{name:<14} {sites.find(name).about}{whose}")
    print(f"\nhere: {here}, since {why}")


@app.command()
def show(
    site: Name = "",
    image: Annotated[
        str, typer.Option(metavar="FILE|VARIANT", help="Hold the host's libraries against this image, here.")
    ] = "",
) -> None:
    """Print what a site says, with the reason and the source of each value."""
    found = _site(site)
    if image:
        _table(found, image)
        return
    print(f"{found.name}: {found.about}")
    skipped = {"name", "about", "binds", "env", "fabric", "why"}
    rows = [(key, getattr(found, key), found.why.get(key, "")) for key in Site.model_fields if key not in skipped]
    rows += [(f"fabric.{key}", value, "") for key, value in found.fabric.model_dump().items()]
    for key, value, why in rows:
        if value:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"\n{key} = {shown}" + (f"\n    {why}" if why else ""))
    if found.why.get("fabric"):
        print(f"    {found.why['fabric']}")
    for bind in found.binds:
        how = ("read-write" if bind.write else "read-only") + ("" if bind.required else ", where it is there")
        print(f"\nbind {bind.path} ({how})\n    {bind.why}" + (f" ({bind.source})" if bind.source else ""))
    for variable in found.env:
        only = "" if variable.nodes == "any" else f" (jobs of {variable.nodes} node{'s' * (variable.nodes != 'one')})"
        source = f" ({variable.source})" if variable.source else ""
        print(f"\nenv {variable.name}={variable.value}{only}\n    {variable.why}{source}")


@app.command()
def keys() -> None:
    """Print every key of a site's file: its type, its default and what it is for."""
    show_keys(Site)


@app.command()
def check(site: Annotated[str, typer.Argument(metavar="[SITE]", help="One; else all.")] = "") -> None:
    """Read site files, and print all that is wrong with them."""
    names = [site] if site else sorted(sites.known())
    wrong = []
    for name in names:
        try:
            good = sites.find(name)
        except DrayError as error:
            wrong.append(str(error))
            continue
        silent = _unexplained(good)
        note = f"; no reason given for {', '.join(silent)}" if silent else ""
        print(f"{name}: good{note}")
    if wrong:
        raise ConfigError(f"{len(wrong)} of {len(names)} sites cannot be used", found="\n".join(wrong))


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Else what Slurm calls the cluster.")] = "",
    show_only: Annotated[bool, typer.Option("--print", help="Print it and write nothing.")] = False,
) -> None:
    """Write a site file from what this machine shows. Run it on a login node, better on a compute node."""
    seen = site_file.see(os.environ)
    wanted = name or re.sub("[^a-z0-9._-]", "-", (seen.cluster or socket.gethostname()).lower())
    written = site_file.text(wanted, seen)
    if show_only:
        print(written, end="")
        return
    model.check(Site, tomllib.loads(written), what="the site file")  # before it is where all verbs read it
    try:
        path = site_file.place(sites.own(), wanted, written)
    except OSError as error:
        raise ConfigError(
            "the site file cannot be written",
            where=sites.own() / f"{wanted}.toml",
            found="it is there already" if isinstance(error, FileExistsError) else error.strerror,
            fix="give another name, or remove it; --print shows what would be in it",
        ) from error
    print(f"{path}\n{written}", end="")


def _site(name: str) -> Site:
    return sites.find(name or sites.detect(submit.cluster(), socket.gethostname())[0])


def _unexplained(site: Site) -> list[str]:
    known = {"name", "about", "why", "binds", "env", "engine"}
    return [key for key in Site.model_fields if key not in known | set(site.why) and key in site.model_fields_set]


def _table(site: Site, image: str) -> None:
    """What would be put in, whose copy would be loaded, and what does not fit: from ELF headers, in the image."""
    file = store.sif(checkout.root(), image) if image in ACCELERATORS else Path(image)
    engine = next((one for one in ("apptainer", "singularity") if process.which(one)), None)
    if engine is None:
        raise UnfitError(
            "neither apptainer nor singularity is here", fix="run this on the cluster, best on a compute node"
        )
    if not file.exists():
        fix = f"make image-{image}" if image in ACCELERATORS else f"name a file, or one of {', '.join(ACCELERATORS)}"
        raise ConfigError("the image is not there", wanted=str(file), fix=fix)
    patterns = [*site.fabric.libraries, *([site.fabric.plugin] if site.fabric.plugin else [])]
    if site.fabric.strategy != "host":
        print(
            f"{site.name} puts no libraries of the host into the container (fabric.strategy = {site.fabric.strategy})"
        )
        return
    missing, mounts, names = [], [], []
    for pattern in patterns:
        matches = sorted(Path("/").glob(pattern.lstrip("/")), key=_version)
        if not matches:
            missing.append(pattern)
            continue
        names.append(f"/host/{matches[-1].name}")
        mounts.append(f'--mount=type=bind,"src={matches[-1].resolve()}","dst={names[-1]}",ro')
    argv = [engine, "--quiet", "exec", "--cleanenv", "--no-mount=home,cwd", *mounts, str(file.absolute())]
    done = process.run([*argv, "python3", "-m", "dray.checks.abi", *names], check=False)
    try:
        rows: list[dict[str, Any]] = json.loads(done.out)
    except ValueError:
        raise DrayError("the image cannot look at the libraries", where=file, found=done.err.strip()) from None
    print(f"{'library of the host':<28} {'also in the image':<40} {'loaded before 1.5':<18} {'since 1.5':<10} verdict")
    for row in rows:
        verdict = "; ".join([*row["troubles"], *(f"{doubt} (perhaps the driver's)" for doubt in row["doubts"])])
        copy = row["in_image"] or "no"
        print(f"{Path(row['library']).name:<28} {copy:<40} {row['before']:<18} {row['since']:<10} {verdict or 'fits'}")
    print(_ORDER)
    if missing or done.code:
        found = "\n".join(
            [
                *(f"{pattern} is not on this machine" for pattern in missing),
                *([] if not done.code else ["see the verdicts"]),
            ]
        )
        raise UnfitError("the host's libraries do not fit this image here", found=found, fix="docs/fabric.md")


_ORDER = """
Before Apptainer 1.5, and in SingularityCE, the host's folder is searched before the image's own (an LD_LIBRARY_PATH of
the image stands before both). Since 1.5 the image's own folders stand before the host's."""


def _version(path: Path) -> list[tuple[int, str]]:
    """As `sort --version-sort` has it: numbers by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
