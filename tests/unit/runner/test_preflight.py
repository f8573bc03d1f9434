"""What nodes prove before a launch: real runners and ranks on this machine, some of them planted wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from dray.checks import host_libraries, transport
from dray.contract.findings import Finding, UnfitError
from dray.runner import preflight
from dray.runner.connections import Report
from helpers import ROOT, until
from nodes import SECRET, Start, ended, free_port

NODES = [{"name": "node1", "address": "127.0.0.1"}, {"name": "node2", "address": "127.0.0.1"}]
Begin = Callable[..., "list[subprocess.Popen[str]]"]


@pytest.fixture
def begin(plan: dict[str, Any], start: Start, tmp_path: Path) -> Begin:
    """Start the nodes of a plan with a preflight; the Python of each first runs what is planted in it."""

    def nodes(
        *planted: str,
        each: int = 1,
        count: int = 2,
        rendezvous_timeout_s: int = 240,
        launcher=("true",),
        **wanted: object,
    ) -> Any:
        names = [f"node{number + 1}" for number in range(count)]
        fabric = {"kind": "unknown", "strategy": "none", "libraries": [], "plugin": "", "transport": ["cxi"]}
        plan["fabric"] = {**fabric, "min_bus_bandwidth_gb_s": 0.0}
        plan["world"] |= {"nodes": [{"name": name, "address": "127.0.0.1"} for name in names]}
        plan["world"] |= {"ranks_per_node": each, "size": each * count, "rendezvous_timeout_s": rendezvous_timeout_s}
        limits = {"timeout_s": 60, "megabytes": 1, "free_gb": 0, "shared_memory_gb": 0, "memory_gb": 0}
        plan.update({"variant": "cpu", "site": "site s", "launcher": [*launcher], "preflight": {**limits, **wanted}})
        started = []
        for number, name in enumerate(names):
            site = tmp_path / f"site-{number}"
            site.mkdir()
            (site / "sitecustomize.py").write_text(planted[number] if planted else "")
            path = os.pathsep.join([str(site), str(ROOT / "src")])
            started.append(start(number, count, name, PYTHONPATH=path, OMP_NUM_THREADS="1"))
        return started

    return nodes


def all_ended(nodes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    return [ended(node) for node in nodes]


def check_process(folder: Path, rank: int) -> int:
    """The process of this rank's check, once it has heard "go"."""
    until((folder / f"preflight/rank-{rank}.stack").exists)
    argv = ["pgrep", "-f", f"dray.checks.rank {folder}/plan.json"]
    processes = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    variable = f"\0RANK={rank}\0".encode()
    return next(int(process) for process in processes if variable in Path(f"/proc/{process}/environ").read_bytes())


def records(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in (folder / "failures").glob("*.json")}


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.torch
def test_fit_nodes_leave_a_report(begin: Begin, tmp_path: Path) -> None:
    for code, said in all_ended(begin()):
        assert code == 0, said
    assert all(node["preflight"] > 0 for node in json.loads((tmp_path / "startup.json").read_text())["nodes"])
    report = json.loads((tmp_path / "preflight/report.json").read_text())
    assert list(report["seconds"]) == [
        "import torch", "libraries", "device", "rendezvous", "all-reduce", "all-gather", "control group",
            "bandwidth",
    ]  # fmt: skip
    assert [row["bytes"] for row in report["sweep"]] == [16384, 262144]
    assert all(row["bus_gb_s"] > 0 for row in report["sweep"])
    assert report["ranks"] == [
        {"node": "node1", "transport": "gloo over TCP"},
        {"node": "node2", "transport": "gloo over TCP"},
    ]
    assert records(tmp_path) == {}


@pytest.mark.seconds
@pytest.mark.torch
def test_a_node_that_answers_wrong_data_is_named(begin: Begin, tmp_path: Path) -> None:
    plant = (
        "import sys\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'dray.checks.network':\n"
        "            import torch.distributed as d\n"
        "            gather = d.all_gather\n"
        "            d.all_gather = lambda pieces, own: gather(pieces, own ^ 1 if len(own) == 1 << 16 else own)\n"
        "            sys.meta_path.remove(self)\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    for code, said in all_ended(begin("", plant)):
        assert code == 69, said
        assert "wrong data from rank 1 on node2\n" in said


@pytest.mark.slow
@pytest.mark.torch
def test_a_rank_that_stops_is_named_at_the_deadline(begin: Begin, tmp_path: Path) -> None:
    """SIGSTOP: it can say nothing more, not even where it stands; and the others must not wait for ever."""
    began = time.monotonic()
    nodes = begin(rendezvous_timeout_s=9, timeout_s=4)
    os.kill(check_process(tmp_path, 1), signal.SIGSTOP)
    for code, said in all_ended(nodes):
        assert code == 69, said
        assert "rank 1 on node2 did not answer in 9 s\n" in said
    assert time.monotonic() - began < 60
    assert "Timeout (0:00:09)" in (tmp_path / "preflight/rank-0.stack").read_text()


DIES_AT_TORCH = """
import os, signal, sys
class Dies:
    def find_spec(self, name, path=None, target=None):
        if name == 'torch':
            {how}
sys.meta_path.insert(0, Dies())
"""


@pytest.mark.seconds
@pytest.mark.torch
def test_a_rank_that_dies_is_named(begin: Begin) -> None:
    """Within seconds: the other one, which waits in the rendezvous, is not waited for."""
    plant = DIES_AT_TORCH.format(how="raise ImportError('libgone.so: no such file')")
    for code, said in all_ended(begin("", plant)):
        assert code == 69, said
        assert "rank 1 on node2 failed\n" in said
        assert "found:  ImportError: libgone.so: no such file, in: import torch\n" in said


@pytest.mark.slow
@pytest.mark.torch
def test_a_rank_that_is_killed_is_named_with_the_signal(begin: Begin) -> None:
    """A library that does not fit ends in SIGSEGV, and a rank that died so leaves no word."""
    plant = DIES_AT_TORCH.format(how="os.kill(os.getpid(), signal.SIGSEGV)")
    (first, said), (second, _) = all_ended(begin("", plant))
    assert (first, second) == (69, 69), said
    assert "rank 1 on node2 was killed by SIGSEGV\n" in said
    assert "  found:  in: import torch\n  fix:    see logs/node-1.log\n" in said


# The preflight's ranks as they are, but for what needs torch: `suite` is planted.
SUITE = """
import os, sys, time, types
from dray.contract.findings import UnfitError
def suite(rank, log):
    rank.phase("all-reduce")
    rank.deadline(rank.plan["preflight"]["timeout_s"])
    PLANTED
    rank.phase("done")
    return {}
planted = types.ModuleType("dray.checks.network")
planted.suite = suite
sys.modules["dray.checks.network"] = planted
"""


def suite(line: str) -> tuple[str, str]:
    """What both nodes have planted, so that each rank runs this line of Python."""
    return (SUITE.replace("PLANTED", line),) * 2


@pytest.mark.slow
@pytest.mark.seconds
def test_a_rank_s_finding_is_every_node_s_and_recorded_once(begin: Begin, tmp_path: Path) -> None:
    line = "if rank.number == 3: raise UnfitError('a library is missing', node=rank.node, rank=3)\n    time.sleep(600)"
    first, second = all_ended(begin(*suite(line), each=2, timeout_s=300))
    assert (first[0], second[0]) == (69, 69), (first, second)
    assert "\na library is missing\n" in first[1]
    assert "dray: this node's ranks are stopped: a library is missing\n" in second[1]
    found = records(tmp_path)
    assert list(found) == ["node-0.json"]
    assert (found["node-0.json"]["node"], found["node-0.json"]["rank"]) == ("node2", 3)


@pytest.mark.seconds
def test_a_rank_that_hangs_is_named_by_what_all_have_reported(begin: Begin, tmp_path: Path) -> None:
    line = "if rank.number != 2: rank.phase('bandwidth')\n    time.sleep(600)"
    for code, shown in all_ended(begin(*suite(line), each=2, timeout_s=2)):
        assert code == 69, shown
        assert "rank 2 on node2 did not answer in 2 s" in shown
        assert "stopped in: all-reduce; the others waited in: bandwidth" in shown
    assert "Timeout (0:00:02)!" in (tmp_path / "preflight/rank-2.stack").read_text()


@pytest.mark.seconds
def test_a_node_that_is_lost_is_to_blame_and_no_other(begin: Begin, tmp_path: Path) -> None:
    """The ranks of the others are then ended by SIGTERM, for which a healthy node was taken for unfit."""
    nodes = begin(*suite("time.sleep(600)"), each=2, timeout_s=300)
    until(lambda: len(list(tmp_path.glob("preflight/rank-*.stack"))) == 4)
    nodes[1].kill()
    code, shown = ended(nodes[0])
    assert (code, "was killed by" in shown) == (75, False), shown
    assert "node 1 (node2) is gone" in shown
    found = records(tmp_path)
    assert list(found) == ["node-0-lost-1.json"]
    assert (found["node-0-lost-1.json"]["node"], found["node-0-lost-1.json"]["lost"]) == ("node2", True)


RANK, RUNNER = ("dray.checks.rank", "dray.runner")
"""The programs which `planted_in` can tell."""


def planted_in(program: str, lines: str) -> str:
    """These lines of Python, of this program alone."""
    return f"import sys\nif {program!r} in sys.orig_argv:\n{textwrap.indent(lines, '    ')}\n"


@pytest.mark.seconds
def test_a_rank_that_ends_without_a_report_is_named(begin: Begin, tmp_path: Path) -> None:
    """As where a library ends its process. The first node, which is well, took its own name for the record."""
    waits, dies = suite("time.sleep(600)")
    for code, shown in all_ended(begin(waits, dies.replace("time.sleep(600)", "os._exit(127)"), timeout_s=300)):
        assert code == 69, shown
        assert "rank 1 on node2 failed\n" in shown
        assert "found:  exit code 127, in: all-reduce\n" in shown
    (found,) = records(tmp_path).values()
    assert (found["node"], found["rank"]) == ("node2", 1)


@pytest.mark.seconds
def test_a_finding_without_a_node_is_not_the_first_node_s(begin: Begin, tmp_path: Path) -> None:
    """Each rank finds that the sum is wrong, and none knows who made it so: no node is left out for it."""
    line = "if rank.number == 1: raise UnfitError('the sum is wrong')\n    time.sleep(600)"
    for code, shown in all_ended(begin(*suite(line), timeout_s=300)):
        assert (code, "the sum is wrong" in shown) == (69, True), shown
    (found,) = records(tmp_path).values()
    assert found["node"] == "node1, node2"


STOPS = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.seconds
def test_a_node_whose_ranks_began_later_is_not_blamed(begin: Begin, tmp_path: Path) -> None:
    """Its image was read from a slow disk, and its own deadline is not over."""
    line = "if rank.number != 2: rank.phase('bandwidth')\n    time.sleep(600)"
    well, hangs = suite(line)
    later = f"{well}\n{planted_in(RANK, 'time.sleep(7)')}"
    for code, shown in all_ended(begin(well, later, hangs.replace("time.sleep(600)", STOPS), count=3, timeout_s=3)):
        assert code == 69, shown
        assert "rank 2 on node3 did not answer in 3 s\n" in shown
        assert "stopped in: all-reduce; the others waited in: bandwidth" in shown


@pytest.mark.seconds
def test_a_rank_that_is_killed_is_named_though_its_neighbours_hang(begin: Begin) -> None:
    """All ranks of the first node failed of it, and the node of the rank waited for its neighbours."""
    line = (
        "if rank.number < 2: raise RuntimeError('the other side is gone')\n"
        "    time.sleep(2)\n"
        "    if rank.number == 3: os.kill(os.getpid(), 11)\n"
        "    time.sleep(600)"
    )
    for code, shown in all_ended(begin(*suite(line), each=2, timeout_s=300)):
        assert code == 69, shown
        assert "rank 3 on node2 was killed by SIGSEGV\n" in shown


SILENT = """
import os, signal
from dray.runner import control, preflight
preflight._GRACE = 1.0
STOPPED
"""


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.parametrize("silent", [0, 1])
def test_a_runner_that_says_nothing_is_named(begin: Begin, tmp_path: Path, silent: int) -> None:
    """It is stopped, or waits for the shared disk, and its connection lives."""
    stopped = "control.Control.report_preflight = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)"
    runners = [planted_in(RUNNER, SILENT.replace("STOPPED", stopped * (node == silent))) for node in range(2)]
    well, other = suite("pass" if silent else "time.sleep(600 * rank.number)")
    nodes = begin(f"{well}\n{runners[0]}", f"{other}\n{runners[1]}", rendezvous_timeout_s=6, timeout_s=2)
    until(lambda: records(tmp_path) != {})
    nodes[silent].kill()
    code, shown = ended(nodes[1 - silent])
    assert code == 69, shown
    assert records(tmp_path)[f"node-{1 - silent}.json"]["node"] == f"node{silent + 1}"
    if silent:
        assert "the runner of node2 does not answer\n" in shown
        assert "found:  no report within 8 s\n" in shown
    else:
        assert "the first node (node1) does not answer\n" in shown


@pytest.mark.seconds
def test_a_launch_that_fails_elsewhere_is_no_failed_preflight(plan: dict[str, Any], begin: Begin) -> None:
    """The first node still waits for its ranks, or for reports, when others launch. No restart may follow: it has no
    preflight, and this one has not ended."""
    plan["world"]["max_restarts"] = 1
    nodes = begin(
        *suite("time.sleep(4 * (rank.number == 0))"), launcher=["sh", "-c", "exit $((5 * $0))", "{node_rank}"]
    )
    (first, shown), (second, _) = all_ended(nodes)
    assert (first, second) == (5, 5), shown
    assert "dray: this node's ranks are stopped: the launcher ended: exit code 5" in shown
    assert "restart 1 of 1" not in shown


IMPORTS = """
import os, sys
class Imports:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open("FOLDER/imports", "a") as file:
                file.write(f"{sys.orig_argv[3:4]} {os.environ.get('RANK')}\\n")
sys.meta_path.insert(0, Imports())
"""


@pytest.mark.seconds
@pytest.mark.torch
def test_each_rank_is_checked_by_one_process_that_imports_torch_once(begin: Begin, tmp_path: Path) -> None:
    """On a node of 8 GPUs it was two: 25 imports before the first step, with those of torchrun and the ranks."""
    ((code, shown),) = all_ended(begin(IMPORTS.replace("FOLDER", str(tmp_path)), each=2, count=1))
    assert code == 0, shown
    imports = (tmp_path / "imports").read_text().splitlines()
    assert sorted(line for line in imports if "checks" in line) == [f"['dray.checks.rank'] {rank}" for rank in range(2)]
    assert sum("checks" not in line for line in imports) <= 1  # the first node's store


@pytest.mark.seconds
def test_machines_that_share_no_disk_hear_of_it_too(plan: dict[str, Any], begin: Begin, start: Start) -> None:
    """As those of a hostfile: each has only its own files."""
    plan["world"] |= {"shared_folder": False, "port": free_port()}
    line = "if rank.number == 3: raise RuntimeError('boom')\n    time.sleep(600)"
    for node in begin(*suite(line), each=2, timeout_s=300):  # for its plan and what it has planted
        node.kill()
        node.wait()
    nodes = []
    for number in range(2):
        machine = Path(plan["folder"], f"machine-{number}")
        (machine / "logs").mkdir(parents=True)
        (machine / "secret").write_text(SECRET)
        own = deepcopy(plan) | {"folder": str(machine), "scratch": str(machine / "own")}
        (machine / "plan.json").write_text(json.dumps(own))
        path = os.pathsep.join([f"{plan['folder']}/site-{number}", str(ROOT / "src")])
        nodes.append(start(number, 2, f"node{number + 1}", machine / "plan.json", PYTHONPATH=path))
    for number, (code, shown) in enumerate(all_ended(nodes)):
        assert code == 69, shown
        assert "rank 3 on node2 failed" in shown
        (record,) = records(Path(plan["folder"], f"machine-{number}")).values()
        assert (record["node"], record["rank"], record["code"]) == ("node2", 3, 69)


class TestWhoIsToBlame:
    """By what each rank of two nodes with two ranks has said."""

    ORDER = ("import torch", "rendezvous", "all-reduce", "all-gather", "done")

    def reports(self, *phases: str, **changes: dict[str, Any]) -> dict[int, list[Report]]:
        """Of each node: one of each of its ranks, which all stopped at their deadline but for these changes."""
        ranks = [
            Report(
                number, f"node{number // 2 + 1}", "logs/node-9.log", f"rank {number}", phase, self.ORDER.index(phase),
                100.0 + number, 60, end="expired" if phase != "done" else "passed",
            )._replace(**changes.get(f"r{number}", {}))
            for number, phase in enumerate(phases)
        ]  # fmt: skip
        return {node: ranks[2 * node : 2 * node + 2] for node in range(len(phases) // 2)}

    def finding(self, reports: dict[int, list[Report]], *, last: bool = True) -> Finding | None:
        refusal = preflight.finding(["node1", "node2"], reports, 90, last=last)
        return refusal and refusal.finding

    def blame(self, reports: dict[int, list[Report]], *, last: bool = True) -> tuple[str, str, int | None] | None:
        found = self.finding(reports, last=last)
        return found and (found.problem, found.node, found.rank)

    def test_who_stopped_in_the_same_collective_as_all_others(self) -> None:
        reports = self.reports(*["all-reduce"] * 4, r2={"end": "stuck"})
        assert self.blame(reports, last=False) == ("rank 2 on node2 did not answer in 60 s", "node2", 2)

    def test_who_came_less_far(self) -> None:
        reports = self.reports("all-gather", "all-reduce", "all-gather", "all-gather")
        assert self.blame(reports, last=False) == ("rank 1 on node1 did not answer in 60 s", "node1", 1)
        found = self.finding(reports)
        assert found
        assert found.found == "stopped in: all-reduce; the others waited in: all-gather"

    def test_nobody_of_a_node_whose_ranks_have_passed(self) -> None:
        reports = self.reports("done", "done", "all-gather", "all-reduce") | {0: []}
        assert self.blame(reports, last=False) == ("rank 3 on node2 did not answer in 60 s", "node2", 3)

    def test_nobody_where_all_hang_alike(self) -> None:
        found = self.finding(self.reports(*["import torch"] * 4), last=False)
        assert found
        assert found[:4] == (
            "import torch did not end within 60 s on any rank",
            "",
            "all ranks join within rendezvous_timeout_s, and end the collectives within preflight.timeout_s",
            "all ranks hang in it, on node1 node2",
        )
        assert found.node == "node1, node2"

    def test_who_was_killed_and_not_who_noticed(self) -> None:
        lost = {"end": "crashed", "why": "RuntimeError: Connection closed by peer"}
        killed = {"end": "killed", "why": "killed by SIGKILL"}
        reports = self.reports(*["all-reduce"] * 4, r0=lost, r1=lost, r2=lost, r3=killed)
        assert self.blame(reports, last=False) == ("rank 3 on node2 was killed by SIGKILL", "node2", 3)

    def test_who_noticed_waits_for_who_knows(self) -> None:
        lost = {"end": "crashed", "why": "RuntimeError: Connection closed by peer"}
        reports = self.reports(*["all-reduce"] * 4, r0=lost, r1=lost, r2=lost, r3={"end": ""})
        assert self.blame(reports, last=False) is None

    def test_who_failed_first_where_nobody_knows_more(self) -> None:
        lost = {"end": "crashed", "why": "RuntimeError: no"}
        phases = ("all-reduce", "rendezvous", "all-reduce", "all-reduce")
        reports = self.reports(*phases, r0=lost, r1=lost, r2=lost, r3=lost)
        assert self.blame(reports) == ("rank 1 on node1 failed", "node1", 1)

    def test_whose_runner_says_nothing(self) -> None:
        for reports in ({0: []}, self.reports("all-gather", "all-gather")):
            assert self.blame(reports, last=False) is None
            assert self.blame(reports) == ("the runner of node2 does not answer", "node2", None)

    def test_not_who_began_later(self) -> None:
        """It has time left in the collective in which the others have waited in vain."""
        reports = self.reports(*["all-reduce"] * 4, r1={"end": ""}, r3={"end": "stuck"})
        assert self.blame(reports, last=False) is None
        assert self.blame(reports) == ("rank 3 on node2 did not answer in 60 s", "node2", 3)


# Lines as the libraries write them; each log ends in what is decisive.
LOGS = {
    "new plugin on Slingshot": (
        "NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.19.0",
        "NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)",
        "NCCL INFO Initialized NET plugin Libfabric",
        "NCCL INFO Assigned NET plugin Libfabric to comm",
    ),
    "old plugin on Slingshot": (
        "NCCL INFO NET/OFI Using aws-ofi-rccl 1.4.0",
        "NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)",
        "NCCL INFO Using network AWS Libfabric",
    ),
    "plugin over TCP": (
        "NCCL INFO NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/8 (found 1 nics)",
        "NCCL INFO Assigned NET plugin AWS Libfabric to comm",
    ),
    "InfiniBand": (
        "NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.1.1<0>",
        "NCCL INFO Assigned NET plugin IB to comm",
        "NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
    ),
    "silent fallback, new": (
        "NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
        "NCCL INFO NET/Socket : Using [0]hsn0:10.1.1.1<0>",
        "NCCL INFO Assigned NET plugin Socket to comm",
    ),
    "silent fallback, RCCL": (
        "NCCL INFO NET/Plugin: No plugin found (librccl-net.so), using internal implementation",
        "NCCL INFO Using network Socket",
    ),
    "a plugin that was dropped": (
        "NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)",
        "NCCL INFO Initialized NET plugin Libfabric",
        "NCCL INFO Assigned NET plugin Socket to comm",
    ),
    "host libraries in part": (
        "create_nccl_ofi_component:817 NCCL WARN NET/OFI Couldn't open a fabric access domain. RC: -38, ERROR: "
        "Function not implemented",
        "NCCL INFO Using network Socket",
    ),
    "no InfiniBand in the container": (
        "NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
        "NCCL INFO Failed to open libibverbs.so[.1]",
        "NCCL INFO Using network Socket",
    ),
    "one node": ("NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",),
}


@pytest.mark.parametrize(
    ("log", "name", "advice"),
    [
        ("new plugin on Slingshot", "cxi", ""),
        ("old plugin on Slingshot", "cxi", ""),
        ("plugin over TCP", "tcp;ofi_rxm", ""),
        ("InfiniBand", "IB", "the container has no NCCL plugin"),
        ("silent fallback, new", "Socket", "the container has no NCCL plugin"),
        ("silent fallback, RCCL", "Socket", "the container has no NCCL plugin"),
        ("no InfiniBand in the container", "Socket", "InfiniBand is not visible in the container"),
        ("a plugin that was dropped", "Socket", ""),
        ("host libraries in part", "Socket", "some of the host's libraries are missing"),
        ("one node", None, ""),
    ],
)
def test_the_transport_is_read_from_the_librarys_log(log: str, name: str | None, advice: str) -> None:
    used = transport.used(LOGS[log])
    assert (used and used.name) == name
    if used:
        assert used.fix.startswith(advice)
        assert bool(used.fix) == bool(advice)


IB = "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB", "NCCL INFO Using network IB"
ENABLED = "NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"
DISABLED = "NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
FAR = "NCCL INFO GPU Direct RDMA Disabled for GPU 3 / HCA 1 (distance 9 > 5)"
OFI = "NCCL INFO NET/Libfabric : GPU Direct RDMA Disabled for HCA 0 'rdmap0s29'"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((*IB, DISABLED), DISABLED),
        ((*IB, ENABLED), None),
        ((*IB, ENABLED, FAR), None),  # one far pair beside others that are near
        ((*IB, FAR), FAR),
        ((*LOGS["new plugin on Slingshot"], OFI), OFI),
        ((*LOGS["silent fallback, new"], DISABLED), None),  # sockets never read a GPU's memory
        (LOGS["one node"], None),
        ((), None),
    ],
)
def test_copies_through_the_hosts_memory_are_seen(lines: tuple[str, ...], found: str | None) -> None:
    slow = transport.indirect(lines, transport.used(lines))
    assert (slow and slow.found) == found
    if slow:
        assert (slow.level, slow.problem) == (
            "warning", "GPU Direct RDMA is disabled: data between nodes is copied through the host's memory",
        )  # fmt: skip


class TestLibraries:
    """The host's and the plugin, once a node, held against the image."""

    def check(self, monkeypatch: pytest.MonkeyPatch, *, named: str, plugin: str = "image") -> None:
        fabric = {"strategy": "host", "libraries": ["/usr/lib64/libnone.so.1"], "plugin": plugin}
        monkeypatch.setenv("NCCL_NET_PLUGIN", named)
        host_libraries.require({"fabric": fabric, "site": "site s"}, "node2")

    def test_an_image_without_its_plugin_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UnfitError) as unfit:
            self.check(monkeypatch, named="/opt/none/libnccl-net-ofi.so")
        assert unfit.value.finding._replace(fix="") == Finding(
            "/opt/none/libnccl-net-ofi.so of node2 does not fit this image",
            wanted="a library that the image can load (site s)",
            found="does not exist",
            code=69,
            node="node2",
        )

    def test_one_that_needs_a_newer_libfabric(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library) -> None:
        own = tmp_path / "libnccl-net-ofi.so"
        library(own, own.name, needed=["libc.so.6"], wants={"libc.so.6": ("GLIBC_2.99",)})
        with pytest.raises(UnfitError) as unfit:
            self.check(monkeypatch, named=str(own))
        assert str(unfit.value.finding.found).startswith("needs GLIBC_2.99 of libc.so.6; ")

    @pytest.mark.parametrize(
        ("named", "plugin"), [("none", "image"), ("ofi", "image"), ("", "image"), ("/no/file", "")]
    )
    def test_what_names_no_file_of_a_sites(self, monkeypatch: pytest.MonkeyPatch, named: str, plugin: str) -> None:
        self.check(monkeypatch, named=named, plugin=plugin)


class TestTheSitesFabric:
    """Compared with NCCL's log as GPUs write it, which this machine lacks."""

    def require(
        self, used: transport.Transport | None, *, gpus: bool = True, best: float = 100.0, nodes=NODES, **fabric
    ) -> None:
        network = pytest.importorskip("dray.checks.network")
        fabric = {"transport": ["cxi"], "min_bus_bandwidth_gb_s": 0.0, **fabric}
        plan = {"site": "site s", "fabric": fabric, "world": {"nodes": nodes}, "variant": "cuda" if gpus else "cpu"}
        rank = type("Rank", (), {"number": 1, "plan": plan, "node": "node2"})()
        network._require_fabric(rank, used, best, [])

    def test_a_silent_fallback_is_refused_with_its_reason_and_fix(self) -> None:
        with pytest.raises(UnfitError) as unfit:
            self.require(transport.used(LOGS["silent fallback, new"]))
        assert unfit.value.finding == Finding(
            "transport: cxi required between nodes, rank 1 on node2 uses another",
            wanted="cxi (site s)",
            found="Socket: NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
            fix="the container has no NCCL plugin: if this network needs one, name its file in fabric.plugin",
            code=69,
            node="node2",
            rank=1,
        )

    def test_the_fast_network_passes_and_a_cpu_needs_none(self) -> None:
        self.require(transport.used(LOGS["new plugin on Slingshot"]))
        self.require(None, gpus=False)
        self.require(transport.used(LOGS["InfiniBand"]), transport=["IB"])

    def test_a_log_that_names_no_network(self) -> None:
        with pytest.raises(UnfitError, match="transport: cxi required between nodes"):
            self.require(None)

    def test_the_minimum_bandwidth_is_for_few_nodes(self) -> None:
        used = transport.used(LOGS["old plugin on Slingshot"])
        self.require(used, best=5.43, min_bus_bandwidth_gb_s=60.0, nodes=NODES * 8)

    def test_the_minimum_bandwidth(self) -> None:
        with pytest.raises(UnfitError, match="bus bandwidth between the nodes is below") as unfit:
            self.require(transport.used(LOGS["old plugin on Slingshot"]), best=5.43, min_bus_bandwidth_gb_s=60.0)
        assert unfit.value.finding.found == "5.43 GB/s"


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.torch
def test_no_collective_of_ours_pickles(begin: Begin) -> None:
    """A rank that can send a pickle can run code in all others."""
    plant = (
        "import pickle\n"
        "def refuse(*_, **__): raise RuntimeError('a pickle')\n"
        "import sys\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'dray.checks.network':\n"
        "            import torch.distributed as d\n"
        "            d.all_gather_object = d.broadcast_object_list = d.gather_object = refuse\n"
        "            sys.meta_path.remove(self)\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    for code, text in all_ended(begin("", plant)):
        assert code == 0, text


# Each exchange takes its time, so that on a busy machine too no other link is far below the rest.
SLOW_RANK = """
import os, sys, time
class Late:
    def find_spec(self, name, path=None, target=None):
        if name == 'dray.checks.network':
            import torch.distributed as d
            exchange = d.batch_isend_irecv
            def slowly(ways):
                time.sleep(4 if os.environ['RANK'] == '2' else 0.2)
                return exchange(ways)
            d.batch_isend_irecv = slowly
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Late())
"""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("nodes", "each", "phase", "named"),
    [(4, 1, "neighbours", "node3"), (1, 4, "neighbours in the node", "node1: rank 2")],
)
def test_a_rank_that_is_slow_is_named_by_real_ranks(
    begin: Begin, tmp_path: Path, nodes: int, each: int, phase: str, named: str
) -> None:
    """As a node with a bad card, or a GPU behind a bad PCIe link: slow to both of its neighbours."""
    for code, said in all_ended(begin(*[SLOW_RANK] * nodes, count=nodes, each=each)):
        assert code == 0, said
    report = json.loads((tmp_path / "preflight/report.json").read_text())
    assert phase in report["seconds"]
    (line,) = report["slow_links"]
    assert line.startswith(f"{named} to both of its neighbours: 0.00")
    assert " GB/s, the others " in line
