"""`python -m dray.checks.preflight PLAN.json` as every rank: prove that the all-reduce is right, and measure it.

Each rank writes its progress to a file of its own node, so that a rank that hangs can be named. At a deadline it writes
its stack to preflight/rank-N.stack and ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dray.checks import abi
from dray.contract import exit_codes, run_folder
from dray.contract.files import write_atomic
from dray.contract.findings import UnfitError

_LONGEST = 1000  # letters of an exception, which all nodes hear


class Rank:
    """This rank of the preflight, and its report of its progress."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.number, self.size = plan, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(plan["folder"], run_folder.PREFLIGHT)
        self._file = Path(plan["scratch"], run_folder.PREFLIGHT, f"rank-{self.number}.json")
        self.node = self.node_of(self.number)
        self.began = time.monotonic()
        self.limit, self.ends = 0, 0.0
        self.seconds: dict[str, float] = {}
        self._phase = ""
        self._stack = (self.folder / f"rank-{self.number}.stack").open("w", encoding="utf-8")

    def deadline(self, seconds: int) -> None:
        """Set the deadline, counted from now, at which this rank writes its stack and ends."""
        self.limit, self.ends = seconds, time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stack)
        self.report()

    def node_of(self, rank: int) -> str:
        """The name of a rank's node."""
        return str(self.plan["world"]["nodes"][rank // self.plan["world"]["ranks_per_node"]]["name"])

    def phase(self, name: str) -> None:
        """Begin the next phase."""
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] = round(now - self.began, 2)
        self.began, self._phase = now, name
        self.report()

    def report(self, **more: object) -> None:
        """Write how far this rank has come, for its node's runner."""
        state: dict[str, object] = {"rank": self.number, "phase": self._phase or "its start", "time": time.time()}
        state |= {"pid": os.getpid(), "limit": self.limit, "ends": self.ends, "order": len(self.seconds)}
        write_atomic(self._file, json.dumps({**state, **more}))


def main(path: str) -> int:
    """Run this rank; return 0, or 69 with the finding in its report."""
    rank = Rank(json.loads(Path(path).read_text(encoding="utf-8")))
    # Reading the image from a busy disk takes most of the time that the rendezvous has.
    rank.deadline(rank.plan["world"]["rendezvous_timeout_s"])
    log = rank.folder / f"nccl-{rank.number}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(log)}
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # else NCCL's ranks return before all have joined
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a command that makes no group of gloo's needs no full mesh
    try:
        rank.phase("import torch")
        collectives = importlib.import_module("dray.checks.collectives")
        _libraries(rank)
        report = collectives.suite(rank, log)
    except UnfitError as unfit:
        rank.report(finding=unfit.finding._asdict())
        return unfit.finding.code
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        rank.report(crashed=f"{type(error).__name__}: {text}"[:_LONGEST])
        raise
    if rank.number == 0:
        write_atomic(Path(rank.plan["folder"], run_folder.PREFLIGHT_REPORT), json.dumps(report, indent=1) + "\n")
    return exit_codes.DONE


def _libraries(rank: Rank) -> None:
    """Check the host's libraries that node.sh has bound, and the plugin, once a node, beside what torch has loaded."""
    rank.phase("libraries")
    fabric = rank.plan["fabric"]
    if fabric["strategy"] != "host" or os.environ["LOCAL_RANK"] != "0":
        return
    # The folder also has the driver's libraries, which the engine binds and no site names.
    bound = [path for pattern in fabric["libraries"] for path in abi.INJECTED.glob(Path(pattern).name)]
    named = os.environ.get("NCCL_NET_PLUGIN", "") if fabric["plugin"] else ""
    plugin = [Path(named)] if named.startswith("/") else []  # a recipe may say none
    for library in abi.check([*bound, *plugin]):
        if library.problems:
            raise UnfitError(
                f"{library.path} of {rank.node} does not fit this image",
                wanted=f"a library that the image can load ({rank.plan['site']})",
                found="; ".join(library.problems),
                fix="add what it needs to fabric.libraries, or use an image with its own libraries; see docs/sites.md",
                node=rank.node,
            )


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
