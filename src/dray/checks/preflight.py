"""`python -m dray.checks.preflight PLAN.json` as every rank: do they hear one another, right, and how fast?

Each rank tells in preflight/rank-N.json how far it is, so that one which hangs can be named by others. At a deadline it
writes where it stands to preflight/rank-N.stack and ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from dray.checks import abi
from dray.checks.rank import Rank, Wrong

_UNFIT = 69


def main(path: str) -> int:
    """0, or 69 with the reason in this rank's file."""
    rank = Rank(json.loads(Path(path).read_text(encoding="utf-8")))
    # All must have met in the time that nodes have for it; reading the image from a busy disk takes most of that.
    rank.deadline(rank.plan["world"]["meet_within"])
    log = rank.folder / f"nccl-{rank.number}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(log)}
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # else NCCL's ranks come back before all are there
    try:
        rank.phase("import torch")
        collectives = importlib.import_module("dray.checks.collectives")
        _libraries(rank)
        report = collectives.suite(rank, log)
    except Wrong as wrong:
        rank.tell(wrong=wrong.said)
        return _UNFIT
    except Exception as error:
        rank.tell(crashed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        raise
    if rank.number == 0:
        part = rank.folder / "report.part"
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        part.replace(rank.folder / "report.json")
    return 0


def _libraries(rank: Rank) -> None:
    """The host's libraries that node.sh has put in, looked at once a node, beside those that torch has loaded."""
    rank.phase("libraries")
    if rank.plan["fabric"]["strategy"] != "host" or os.environ["LOCAL_RANK"] != "0":
        return
    fabric = rank.plan["fabric"]
    # The engine puts the driver's libraries there, too, which are no business of the site's.
    ours = [path for pattern in fabric["libraries"] for path in abi.INJECTED.glob(Path(pattern).name)]
    plugin = [Path(os.environ["NCCL_NET_PLUGIN"])] if fabric["plugin"] else []
    for row in abi.look([*ours, *plugin]):
        if row.troubles:
            raise Wrong(
                f"{row.library} of {rank.node_of(rank.number)} does not fit this image",
                wanted=f"a library that can be loaded here ({rank.plan['site']})",
                found="; ".join(row.troubles),
                fix="put in what it needs (fabric.libraries), or take an image with its own; docs/fabric.md",
            )


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
