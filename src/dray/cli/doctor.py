"""`dray doctor`: check this machine."""

from __future__ import annotations

import json
from itertools import chain

import typer

from dray.cli.args import Json, Site
from dray.config import dray_home
from dray.contract import exit_codes
from dray.fitness import build as builds
from dray.fitness import doctor as checks
from dray.fitness import host


def doctor(
    variant: str = "",
    site: Site = "",
    build: bool = False,
    as_json: Json = False,
) -> None:
    """Check whether runs can start on this machine or node, and print a fix for each problem; exit code 69 if any.

    VARIANT: Check for a build of this image only.
    --build: Check what an image build needs, without fetching anything.

    dray doctor --json
    dray doctor --build cuda
    """
    code = exit_codes.UNFIT
    if build or variant:
        root = dray_home.root(build=True)
        shared = list(checks.mirror_table())
        names = [variant] if variant else builds.variants(root)
        found = [[*builds.check(builds.Build(checkout=root, variant=name)), *shared] for name in names]
        code = min(max(finding.code for finding in findings) for findings in found)  # of the best image
        findings = list(dict.fromkeys(chain(*found)))  # images share many
    else:
        findings = checks.check(host.site(site))
    if as_json:
        print(json.dumps([finding.data() for finding in findings], indent=1))
    else:
        print("\n".join(finding.line() for finding in findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(code)
