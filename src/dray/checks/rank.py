"""`python -m dray.checks.rank PLAN.json`: the check process of a rank, before the launch.

On each node's first rank it checks the node, and on each its GPU. Then it waits for "go": a line of JSON on standard
input, with the variables that are known only after the rendezvous. After that it runs the collectives with all other
ranks. It prints its progress and its findings as lines of JSON. At a deadline of the collectives it writes its stack to
preflight/rank-N.stack and ends.
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

from dray.checks import node_checks
from dray.contract import exit_codes, run_folder
from dray.contract.files import write_atomic
from dray.contract.findings import Finding, UnfitError

_LONGEST = 1000  # letters of an exception, which all nodes hear


class Rank:
    """This rank, and what it tells its node's runner."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.number, self.local = plan, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.size = plan["world"]["size"]
        self.folder = Path(plan["folder"], run_folder.PREFLIGHT)
        self.node = self.node_of(self.number)
        self.part = "node"
        """What it checks: this node, or a GPU of it."""
        self.unfit = False
        self.seconds: dict[str, float] = {}
        """How long each phase after "go" took."""
        self._phase, self._began = "", 0.0
        self._gone = False
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # libraries print what they like

    def tell(self, **fields: object) -> None:
        """Print a line for the runner."""
        print(json.dumps(fields), file=self._lines, flush=True)

    def report(self, finding: Finding) -> None:
        """Tell a finding; after one with a code, this rank ends."""
        self.unfit |= bool(finding.code)
        self.tell(finding=finding._asdict())

    def phase(self, name: str) -> None:
        """Begin the next phase. Before "go" no rank is further than another: they do not wait for each other."""
        now = time.monotonic()
        if self._gone and self._phase:
            self.seconds[self._phase] = round(now - self._began, 2)
        self._began, self._phase = now, name
        order = len(self.seconds) if self._gone else -1
        self.tell(progress={"phase": name, "part": self.part, "order": order, "time": time.time()})

    def deadline(self, seconds: int) -> None:
        """Set the deadline, counted from now, at which this rank writes its stack and ends with code 1."""
        self.tell(progress={"limit": seconds, "expires": time.monotonic() + seconds})
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stack)

    def node_of(self, rank: int) -> str:
        """The name of a rank's node."""
        return str(self.plan["world"]["nodes"][rank // self.plan["world"]["ranks_per_node"]]["name"])

    def wait_for_go(self) -> bool:
        """Wait until the runner has met the other nodes; False: it has ended."""
        self.tell(ready=True)
        if not (line := sys.stdin.readline()):
            return False
        os.environ |= json.loads(line)
        self._phase, self._gone, self.part = "", True, f"rank {self.number}"
        self._stack = (self.folder / f"rank-{self.number}.stack").open("w", encoding="utf-8")
        # Reading the image from a busy disk takes most of the time that the rendezvous has.
        self.deadline(self.plan["world"]["rendezvous_timeout_s"])
        return True


def main(path: str) -> int:
    """Check this rank; return 0, or 69 once the reason has been told."""
    rank = Rank(json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        _check_alone(rank)
        if not rank.unfit and rank.wait_for_go():
            _check_together(rank)
    except UnfitError as unfit:
        rank.report(unfit.finding)
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        rank.tell(progress={"crashed": f"{type(error).__name__}: {text}"[:_LONGEST]})
        raise
    return exit_codes.UNFIT if rank.unfit else exit_codes.DONE


def _check_alone(rank: Rank) -> None:
    """Check what needs no other rank. A rank on a CPU imports torch after the rendezvous, a rank on a GPU here."""
    if rank.local == 0:
        for name, check in node_checks.checks(rank.plan):
            rank.phase(name)
            for finding in node_checks.findings(name, check):
                rank.report(finding._replace(node=rank.node))
    if rank.plan["variant"] != "cpu":
        rank.part = f"GPU {rank.local}"
        rank.phase("import torch")
        importlib.import_module("dray.checks.gpu").check(rank)


def _check_together(rank: Rank) -> None:
    log = rank.folder / f"nccl-{rank.number}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(log)}
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # else NCCL's ranks return before all have joined
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a command that makes no group of gloo's needs no full mesh
    rank.phase("import torch")
    collectives = importlib.import_module("dray.checks.collectives")
    rank.phase("libraries")
    _check_libraries(rank)
    report = collectives.suite(rank, log)
    if rank.number == 0:
        write_atomic(Path(rank.plan["folder"], run_folder.PREFLIGHT_REPORT), json.dumps(report, indent=1) + "\n")


def _check_libraries(rank: Rank) -> None:
    """Check the host's libraries that node.sh has bound, and the plugin, once a node, beside what torch has loaded."""
    fabric = rank.plan["fabric"]
    if fabric["strategy"] != "host" or rank.local:
        return
    abi = importlib.import_module("dray.checks.abi")
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
            )


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
