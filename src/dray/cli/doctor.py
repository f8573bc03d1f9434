"""`dray doctor`: one page on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dray.cli.options import Site
from dray.contract import exit_codes
from dray.fitness import doctor as checks
from dray.fitness import host


def doctor(site: Site = "", as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False) -> None:
    """Show what this machine or node has for a run, and the fix of what is wrong; 69 if something is.

    dray doctor --json
    """
    findings = checks.check(host.site(site))
    if as_json:
        print(json.dumps([finding.data() for finding in findings], indent=1))
    else:
        print("\n".join(finding.line() for finding in findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(exit_codes.UNFIT)
