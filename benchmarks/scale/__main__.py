"""`python benchmarks/scale [NAME...]`: simulations of thousands of nodes, each figure next to its aim."""

from __future__ import annotations

import sys
from importlib import import_module

import table

SIMULATIONS = {
    "rendezvous": "rendezvous",
    "plan": "plans",
    "startup": "startup",
    "files": "files",
    "checkpoints": "checkpoints",
}
"""By name, the module of each: one is loaded in its turn, since torch would be part of the first node's memory."""


def main(names: list[str]) -> int:
    """1 when an aim is missed."""
    unknown = [name for name in names if name not in SIMULATIONS]
    if unknown:
        print(f"there is no simulation {' '.join(unknown)}; there are {' '.join(SIMULATIONS)}", file=sys.stderr)
        return 78
    rows = []
    for name in names or SIMULATIONS:
        found = import_module(SIMULATIONS[name]).rows()
        table.show(found)
        rows += found
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
