"""`dray diff`: what differs between two runs, with their losses and times."""

from __future__ import annotations

from dray.cli.args import Json, NamedRun, Runs
from dray.runs import compare
from dray.runs.store import find


def diff(a: NamedRun, b: NamedRun, as_json: Json = False, runs: Runs = None) -> None:
    """Show what differs between two runs, the most important first, and their losses and times side by side.

    dray diff 4711 4712
    """
    found = compare.runs(find(a, runs), find(b, runs))
    print(found.model_dump_json(indent=1) if as_json else "\n".join(compare.text(found)))
