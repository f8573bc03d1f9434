"""`dray doctor`: check this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dray.cli.args import Site
from dray.config import dray_home
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, Finding
from dray.fitness import build as builds
from dray.fitness import doctor as checks
from dray.fitness import host
from dray.fitness.build import Build


def doctor(
    variant: Annotated[str, typer.Argument(metavar="[VARIANT]", help="With --build: check for this image only.")] = "",
    site: Site = "",
    build: Annotated[
        bool, typer.Option("--build", help="Check what an image build needs, without fetching anything.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Check whether runs can start on this machine or node, and print a fix for each problem; exit code 69 if any.

    dray doctor --json
    dray doctor --build cuda
    """
    if variant and not build:
        raise ConfigError("VARIANT needs --build", found=variant, fix=f"dray doctor --build {variant}")
    findings, code = _build(variant) if build else (checks.check(host.site(site)), exit_codes.UNFIT)
    if as_json:
        print(json.dumps([finding.data() for finding in findings], indent=1))
    else:
        print("\n".join(finding.line() for finding in findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(code)


def _build(variant: str) -> tuple[list[Finding], int]:
    """Each finding once, of this image or of all, and the exit code; of all images, the code of the best one."""
    root = dray_home.root(build=True)
    shared = list(checks.mirror_table())
    named = [variant] if variant else builds.variants(root)
    found = [[*builds.check(Build(checkout=root, variant=name)), *shared] for name in named]
    codes = [max(finding.code for finding in findings) for findings in found]
    return list(dict.fromkeys(finding for findings in found for finding in findings)), min(codes)
