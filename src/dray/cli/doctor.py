"""`dray doctor`: one page on this machine."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Annotated

import typer

from dray.cli.options import Site
from dray.config import sites
from dray.contract import exit_codes
from dray.fitness import doctor as look
from dray.runs import submit

_MARKS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def doctor(site: Site = "", as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False) -> None:
    """Show what this machine or node has for a run, what is wrong, and the fix of each; 69 where something is."""
    name, why = (site, "it was named") if site else sites.detect(submit.cluster(), socket.gethostname())
    found = sites.find(name) if site or name != sites.GENERIC else None
    items = look.look(found, why)
    if as_json:
        print(json.dumps([asdict(item) for item in items], indent=1))
    else:
        for item in items:
            print(f"{_MARKS[item.state]} {item.about}: {item.found}")
            if item.fix:
                print(f"      fix: {item.fix}")
    if any(item.state == "wrong" for item in items):
        raise typer.Exit(exit_codes.UNFIT)
