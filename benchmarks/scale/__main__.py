"""`python benchmarks/scale [NAME...]`: simulations of thousands of nodes, each figure next to its aim."""

from __future__ import annotations

import sys

import checkpoints
import files
import plans
import rendezvous
import staging
import startup
import table

SIMULATIONS = {
    "rendezvous": rendezvous.rows,
    "plan": plans.rows,
    "startup": startup.rows,
    "staging": staging.rows,
    "files": files.rows,
    "checkpoints": checkpoints.rows,
}


def main(names: list[str]) -> int:
    """1 when an aim is missed."""
    unknown = [name for name in names if name not in SIMULATIONS]
    if unknown:
        print(f"there is no simulation {' '.join(unknown)}; there are {' '.join(SIMULATIONS)}", file=sys.stderr)
        return 78
    rows = []
    for name in names or SIMULATIONS:
        found = SIMULATIONS[name]()
        table.show(found)
        rows += found
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
