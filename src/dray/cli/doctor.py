"""`dray doctor`: one page on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dray.cli.options import Site
from dray.config import checkout
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, Finding
from dray.fitness import build as builds
from dray.fitness import doctor as checks
from dray.fitness import host
from dray.fitness.machine import Build


def doctor(
    variant: Annotated[str, typer.Argument(metavar="[VARIANT]", help="With --build: of this image alone.")] = "",
    site: Site = "",
    build: Annotated[bool, typer.Option("--build", help="What a build of images needs, and fetches nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Show what this machine or node has for a run, and the fix of what is wrong; 69 if something is.

    dray doctor --json
    dray doctor --build cuda
    """
    if variant and not build:
        raise ConfigError("an image is checked with --build", found=variant, fix=f"dray doctor --build {variant}")
    findings = _build(variant) if build else checks.check(host.site(site))
    if as_json:
        print(json.dumps([finding.data() for finding in findings], indent=1))
    else:
        print("\n".join(finding.line() for finding in findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(max(finding.code for finding in findings) if build else exit_codes.UNFIT)


def _build(variant: str) -> list[Finding]:
    """Each finding once, of this image or of all."""
    root = checkout.root(build=True)
    named = [variant] if variant else builds.variants(root)
    found = [finding for name in named for finding in builds.check(Build(checkout=root, variant=name))]
    return list(dict.fromkeys(found))
