"""`dray doctor`: check this machine."""

from __future__ import annotations

import json

import typer

from dray.cli.args import Json, Site
from dray.config import dray_home
from dray.contract import exit_codes
from dray.fitness import build as builds
from dray.fitness import doctor as checks
from dray.fitness import network_and_site


def doctor(
    site: Site = "",
    build: str = "",
    as_json: Json = False,
) -> None:
    """Check whether runs can start on this machine or node, and print a fix for each problem; exit code 69 if any.

    --build VARIANT: Check what a build of this image needs.

    dray doctor --json
    dray doctor --build cuda
    """
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
