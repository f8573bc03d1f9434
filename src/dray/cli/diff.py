"""`dray diff`: what differs between two runs, and what it came to."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli.options import Runs
from dray.contract.values import printable
from dray.runs import compared, pack

A = Annotated[str, typer.Argument(metavar="A", help="A run, as every verb takes it, or a packed capsule.")]
B = Annotated[str, typer.Argument(metavar="[B]", help="The other one; else the newest.")]


def diff(
    a: A,
    b: B = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    runs: Runs = None,
) -> None:
    """Show what differs between two runs, the likeliest to matter first, and losses and times side by side.

    dray diff 4711 4712
    """
    with pack.opened(a, runs) as ours, pack.opened(b, runs) as theirs:
        found = compared.compare(ours, theirs)
    print(found.model_dump_json(indent=1) if as_json else printable("\n".join(compared.text(found))))
