"""`python -m dray.checks.rank PLAN.json` as every rank: check the node and its GPU, then, with all ranks, the network.

The first rank of a node checks the node, and each rank its GPU. Then it waits for "go", a line of JSON on standard
input: the variables that are known only after the rendezvous. It tells its runner its progress and its findings by
lines of JSON, so that a rank that hangs can be named. At a deadline it writes its stack to preflight/rank-N.stack and
ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from dray.checks import node_checks
from dray.contract import exit_codes, run_folder
from dray.contract.files import write_atomic
from dray.contract.findings import Finding, UnfitError

_LONGEST = 1000  # letters of an exception, which all nodes hear
_PR_SET_PDEATHSIG = 1


class Rank:
    """This rank, and what it tells its runner."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.number, self.local = plan, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.size = plan["world"]["size"]
        self.folder = Path(plan["folder"], run_folder.PREFLIGHT)
        self.node = self.node_of(self.number)
        self.unfit = False
        self.seconds: dict[str, float] = {}
        """How long each phase after "go" took."""
        self._phase, self._began = "", 0.0
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # libraries print what they like

    def tell(self, **fields: object) -> None:
        """Print a line for the runner."""
        print(json.dumps(fields), file=self._lines, flush=True)

    def report(self, finding: Finding) -> None:
        """Tell a finding."""
        self.unfit = self.unfit or bool(finding.code)
        self.tell(finding=finding._asdict())

    def node_of(self, rank: int) -> str:
        """The name of a rank's node."""
        return str(self.plan["world"]["nodes"][rank // self.plan["world"]["ranks_per_node"]]["name"])

    def phase(self, name: str) -> None:
        """Begin the next phase of what all ranks do together."""
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] = round(now - self._began, 2)
        self._phase, self._began = name, now
        self.tell(phase=name, order=len(self.seconds), time=time.time())

    def deadline(self, seconds: int) -> None:
        """Set the deadline, counted from now, at which this rank writes its stack and ends."""
        self.tell(limit=seconds)
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stack)

    def wait_for_go(self) -> None:
        """Wait until all nodes have met; end if the runner has ended."""
        self.tell(ready=True, part=f"rank {self.number}", phase="its start")
        line = sys.stdin.readline()
        if not line:
            sys.exit(exit_codes.FAILED)
        os.environ |= json.loads(line)
        self._stack = (self.folder / f"rank-{self.number}.stack").open("w", encoding="utf-8")


def main(path: str) -> int:
    """Check this rank; return 0, or 69 once the reason has been told."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also in a driver call, when the runner is killed
    rank = Rank(json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        _check_alone(rank)
        if not rank.unfit:
            rank.wait_for_go()
            _check_together(rank)
    except UnfitError as unfit:
        rank.report(unfit.finding)
    except Exception as error:
        rank.tell(why=f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST])
        raise
    return exit_codes.UNFIT if rank.unfit else exit_codes.DONE


def _check_alone(rank: Rank) -> None:
    """Check what needs no other rank. A rank on a CPU imports torch after "go"."""
    if rank.local == 0:
        for name, check in node_checks.checks(rank.plan):
            rank.tell(part="node", phase=name)
            for finding in node_checks.findings(name, check):
                rank.report(finding)
    if rank.plan["variant"] != "cpu":
        rank.tell(part=f"GPU {rank.local}", phase="import torch")
        importlib.import_module("dray.checks.device").of_rank(rank)


def _check_together(rank: Rank) -> None:
    # Reading the image from a busy disk takes most of the time that the rendezvous has.
    rank.deadline(rank.plan["world"]["rendezvous_timeout_s"])
    log = rank.folder / f"nccl-{rank.number}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(log)}
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # else NCCL's ranks return before all have joined
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a command that makes no group of gloo's needs no full mesh
    rank.phase("import torch")
    network = importlib.import_module("dray.checks.network")
    rank.phase("libraries")
    if rank.local == 0:
        importlib.import_module("dray.checks.host_libraries").require(rank.plan, rank.node)
    report = network.suite(rank, log)
    if rank.number == 0:
        write_atomic(Path(rank.plan["folder"], run_folder.PREFLIGHT_REPORT), json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
