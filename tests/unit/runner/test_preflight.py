"""What nodes prove before a launch: real ranks on this machine, some of them planted wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dray.checks import transport
from dray.contract.findings import Finding, UnfitError
from dray.runner import preflight

WANTED = {"timeout_s": 60, "megabytes": 1}
NODES = [{"name": "n1", "address": "127.0.0.1"}, {"name": "n2", "address": "127.0.0.1"}]


def made(folder: Path, port: int, **wanted: object) -> dict[str, Any]:
    for name in ("logs", "preflight"):
        (folder / name).mkdir(parents=True)
    world = {"nodes": NODES, "ranks_per_node": 1, "size": 2, "port": port, "shared_folder": True}
    fabric = {"kind": "unknown", "strategy": "none", "libraries": [], "plugin": "", "transport": ["cxi"]}
    fabric |= {"min_bus_bandwidth_gb_s": 0.0}
    plan = {"folder": str(folder), "variant": "cpu", "site": "site s", "world": world, "fabric": fabric}
    world["rendezvous_timeout_s"] = wanted.pop("rendezvous_timeout_s", 240)
    plan["preflight"] = {**WANTED, **wanted}
    (folder / "plan.json").write_text(json.dumps(plan))
    return plan


# A node of the plan, as the runner is one once all have met. What is planted is Python that its ranks run first.
NODE = """
import json, os, sys
from dray.contract.findings import DrayError
from dray.runner import children, preflight
preflight._GRACE = preflight._OTHERS = 3.0
plan = json.load(open(sys.argv[1]))
try:
    preflight.check(plan, int(sys.argv[2]), children.Children(), dict(os.environ))
except DrayError as refusal:
    print(refusal)
    sys.exit(refusal.finding.code)
"""


def start(folder: Path, number: int, plant: str = "") -> subprocess.Popen[str]:
    site = folder / f"site-{number}"
    site.mkdir()
    (site / "sitecustomize.py").write_text(plant)
    port = str(json.loads((folder / "plan.json").read_text())["world"]["port"])
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**os.environ, **store, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    argv = [sys.executable, "-c", NODE, folder / "plan.json", str(number)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


def both(folder: Path, plant: str = "") -> list[tuple[int, str]]:
    nodes = [start(folder, 0), start(folder, 1, plant)]
    said = [node.communicate(timeout=400)[0] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store, as the first node's runner has it served."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        argv = [sys.executable, "-m", "dray.tcp_store", "127.0.0.1", str(port), str(listener.fileno())]
        store = subprocess.Popen(argv, pass_fds=[listener.fileno()])
    yield port
    store.kill()
    store.wait()


@pytest.mark.seconds
@pytest.mark.torch
def test_fit_nodes_leave_a_report(tmp_path: Path, port: int) -> None:
    made(tmp_path / "run", port)
    for code, said in both(tmp_path / "run"):
        assert code == 0, said
        assert said.startswith("dray: preflight took ")
    report = json.loads((tmp_path / "run/preflight/report.json").read_text())
    assert list(report["seconds"]) == [
        "import torch", "libraries", "device", "rendezvous", "all-reduce", "all-gather", "new groups",
            "control group", "bandwidth",
    ]  # fmt: skip
    assert [row["bytes"] for row in report["sweep"]] == [16384, 262144]
    assert all(row["bus_gb_s"] > 0 for row in report["sweep"])
    assert report["ranks"] == [
        {"node": "n1", "transport": "gloo over TCP"},
        {"node": "n2", "transport": "gloo over TCP"},
    ]


@pytest.mark.seconds
@pytest.mark.torch
def test_a_node_that_answers_wrong_data_is_named(tmp_path: Path, port: int) -> None:
    plant = (
        "import sys\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'dray.checks.collectives':\n"
        "            import torch.distributed as d\n"
        "            gather = d.all_gather\n"
        "            d.all_gather = lambda pieces, own: gather(pieces, own ^ 1 if len(own) == 1 << 16 else own)\n"
        "            sys.meta_path.remove(self)\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    made(tmp_path / "run", port)
    for code, said in both(tmp_path / "run", plant):
        assert code == 69, said
        assert said.splitlines()[0] == "wrong data from rank 1 on n2"


@pytest.mark.slow
@pytest.mark.torch
def test_a_rank_that_stops_is_named_at_the_deadline(tmp_path: Path, port: int) -> None:
    """SIGSTOP: it can say nothing more, not even where it stands; and the others must not wait for ever."""
    folder = tmp_path / "run"
    made(folder, port, rendezvous_timeout_s=9, timeout_s=4)
    began = time.monotonic()
    nodes = [start(folder, 0), start(folder, 1)]
    file = folder / "preflight/rank-1.json"
    while not file.exists():
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    os.kill(json.loads(file.read_text())["pid"], signal.SIGSTOP)
    said = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [69, 69], said
    for text in said:
        assert text.splitlines()[0] == "rank 1 on n2 did not answer in 9 s"
    assert time.monotonic() - began < 50
    assert "Timeout (0:00:09)" in (folder / "preflight/rank-0.stack").read_text()


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.torch
def test_a_rank_that_dies_is_named(tmp_path: Path, port: int) -> None:
    made(tmp_path / "run", port, rendezvous_timeout_s=12)
    plant = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ImportError('libgone.so: no such file')\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    (_, _), (code, said) = both(tmp_path / "run", plant)
    assert code == 69
    assert said.splitlines()[:3] == [
        "rank 1 on n2 failed",
        "  wanted: a rank that passes the preflight",
        "  found:  ImportError: libgone.so: no such file, in: import torch",
    ]


@pytest.mark.torch
def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path, port: int) -> None:
    """A library that does not fit ends in SIGSEGV, and a rank that died so leaves no word."""
    made(tmp_path / "run", port)
    plant = (
        "import os, signal, sys\n"
        "class Dies:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            os.kill(os.getpid(), signal.SIGSEGV)\n"
        "sys.meta_path.insert(0, Dies())\n"
    )
    nodes = [start(tmp_path / "run", 0), start(tmp_path / "run", 1, plant)]
    out, _ = nodes[1].communicate(timeout=60)
    nodes[0].terminate()  # as Slurm does it, once a node has ended badly
    nodes[0].communicate(timeout=30)
    assert nodes[0].returncode == 128 + signal.SIGTERM
    assert nodes[1].returncode == 69
    assert out.splitlines()[:3] == [
        "rank 1 on n2 was killed by SIGSEGV",
        "  wanted: a rank that passes the preflight",
        "  found:  in: import torch",
    ]


class TestWhoIsToBlame:
    """By what each rank of two nodes with two ranks has said."""

    PLAN: ClassVar[dict[str, Any]] = {"world": {"nodes": NODES, "ranks_per_node": 2, "size": 4, "shared_folder": True}}
    ORDER = ("import torch", "rendezvous", "all-reduce", "all-gather", "done")

    def ranks(self, *phases: str, **changes: dict[str, Any]) -> dict[int, dict[str, Any]]:
        said = {}
        for number, phase in enumerate(phases):
            node = NODES[number // 2]["name"]
            said[number] = {
                "rank": number, "node": node, "phase": phase, "order": self.ORDER.index(phase), "limit": 60,
                "time": 100.0 + number, "expired": phase != "done", **changes.get(f"r{number}", {}),
            }  # fmt: skip
        return said

    def blame(self, ranks: dict[int, dict[str, Any]], *, last: bool = True) -> tuple[str, str, int | None] | None:
        refusal = preflight.finding(self.PLAN, ranks, "the log", last=last)
        return refusal and (str(refusal).splitlines()[0], refusal.finding.node, refusal.finding.rank)

    def test_who_stopped_in_the_same_collective_as_all_others(self) -> None:
        ranks = self.ranks(*["all-reduce"] * 4, r2={"expired": False})
        assert self.blame(ranks, last=False) is None
        assert self.blame(ranks) == ("rank 2 on n2 did not answer in 60 s", "n2", 2)

    def test_who_came_less_far(self) -> None:
        ranks = self.ranks("all-gather", "all-reduce", "all-gather", "all-gather")
        assert self.blame(ranks, last=False) == ("rank 1 on n1 did not answer in 60 s", "n1", 1)
        said = str(preflight.finding(self.PLAN, ranks, "", last=True))
        assert "found:  stopped in: all-reduce; the others waited in: all-gather" in said

    def test_who_never_began(self) -> None:
        ranks = self.ranks(*["rendezvous"] * 3)
        assert self.blame(ranks) == ("rank 3 on n2 did not answer in 60 s", "n2", 3)

    def test_nobody_where_all_hang_alike(self) -> None:
        hang = preflight.finding(self.PLAN, self.ranks(*["import torch"] * 4), "", last=False)
        assert str(hang).splitlines()[:3] == [
            "import torch did not end within 60 s on any rank",
            "  wanted: all ranks join within rendezvous_timeout_s, and end the collectives within preflight.timeout_s",
            "  found:  all ranks hang in it, on n1 n2",
        ]

    def test_who_was_killed_and_not_who_noticed(self) -> None:
        lost = {"crashed": "RuntimeError: Connection closed by peer", "expired": False}
        ranks = self.ranks(*["all-reduce"] * 4, r0=lost, r1=lost, r2=lost, r3={"killed": "SIGKILL", "expired": False})
        assert self.blame(ranks, last=False) == ("rank 3 on n2 was killed by SIGKILL", "n2", 3)

    def test_who_noticed_waits_for_who_knows(self) -> None:
        lost = {"crashed": "RuntimeError: Connection closed by peer", "expired": False}
        ranks = self.ranks(*["all-reduce"] * 4, r0=lost, r1=lost, r2=lost, r3={"expired": False})
        assert self.blame(ranks, last=False) is None

    def test_who_failed_first_where_nobody_knows_more(self) -> None:
        lost = {"crashed": "RuntimeError: no", "expired": False}
        ranks = self.ranks("all-reduce", "rendezvous", "all-reduce", "all-reduce", r0=lost, r1=lost, r2=lost, r3=lost)
        assert self.blame(ranks) == ("rank 1 on n1 failed", "n1", 1)

    def test_without_any_word(self) -> None:
        assert self.blame({}) == ("the preflight failed without a report", "", None)


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

    def check(self, monkeypatch: pytest.MonkeyPatch, *, named: str, plugin: str = "image", local: str = "0") -> None:
        module = pytest.importorskip("dray.checks.preflight")
        fabric = {"strategy": "host", "libraries": ["/usr/lib64/libnone.so.1"], "plugin": plugin}
        rank = type("Rank", (), {"plan": {"fabric": fabric, "site": "site s"}, "node": "n2", "phase": print})()
        monkeypatch.setenv("NCCL_NET_PLUGIN", named)
        monkeypatch.setenv("LOCAL_RANK", local)
        module._libraries(rank)

    def test_an_image_without_its_plugin_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UnfitError) as unfit:
            self.check(monkeypatch, named="/opt/none/libnccl-net-ofi.so")
        assert unfit.value.finding._replace(fix="") == Finding(
            "/opt/none/libnccl-net-ofi.so of n2 does not fit this image",
            wanted="a library that the image can load (site s)",
            found="does not exist",
            code=69,
        )
        self.check(monkeypatch, named="/opt/none/libnccl-net-ofi.so", local="1")  # the first has said it

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
        collectives = pytest.importorskip("dray.checks.collectives")
        fabric = {"transport": ["cxi"], "min_bus_bandwidth_gb_s": 0.0, **fabric}
        plan = {"site": "site s", "fabric": fabric, "world": {"nodes": nodes}}
        rank = type("Rank", (), {"number": 1, "plan": plan, "node": "n2", "logs": "preflight/nccl-*.log"})()
        collectives._require_fabric(rank, used, best, [], gpus=gpus)

    def test_a_silent_fallback_is_refused_with_its_reason_and_fix(self) -> None:
        with pytest.raises(UnfitError) as unfit:
            self.require(transport.used(LOGS["silent fallback, new"]))
        assert unfit.value.finding == Finding(
            "transport: cxi required between nodes, rank 1 on n2 uses another",
            wanted="cxi (site s)",
            found="Socket: NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
            fix="the container has no NCCL plugin: if this network needs one, name its file in fabric.plugin",
            code=69,
            node="n2",
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
def test_no_collective_of_ours_pickles(tmp_path: Path, port: int) -> None:
    """A rank that can send a pickle can run code in all others."""
    plant = (
        "import pickle\n"
        "def refuse(*_, **__): raise RuntimeError('a pickle')\n"
        "import sys\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'dray.checks.collectives':\n"
        "            import torch.distributed as d\n"
        "            d.all_gather_object = d.broadcast_object_list = d.gather_object = refuse\n"
        "            sys.meta_path.remove(self)\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    made(tmp_path / "run", port)
    for code, text in both(tmp_path / "run", plant):
        assert code == 0, text


# Each exchange takes its time, so that on a busy machine too no other link is far below the rest.
SLOW_LINK = """
import os, sys, time
class Late:
    def find_spec(self, name, path=None, target=None):
        if name == 'dray.checks.collectives':
            import torch.distributed as d
            exchange = d.batch_isend_irecv
            def slowly(ways):
                time.sleep(4 if ways[0].peer == 2 else 0.2)
                return exchange(ways)
            d.batch_isend_irecv = slowly
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Late())
"""
NO_SLOW_LINK = SLOW_LINK.replace("4 if ways[0].peer == 2 else ", "")


@pytest.mark.slow
@pytest.mark.torch
def test_a_link_that_is_slow_is_named_by_real_ranks(tmp_path: Path, port: int) -> None:
    """Only on the way from the second node to the third."""
    folder = tmp_path / "run"
    plan = made(folder, port)
    nodes = [{"name": f"n{number}", "address": "127.0.0.1"} for number in (1, 2, 3)]
    plan["world"] |= {"nodes": nodes, "size": 3}
    (folder / "plan.json").write_text(json.dumps(plan))
    started = [start(folder, number, SLOW_LINK if number == 1 else NO_SLOW_LINK) for number in range(3)]
    shown = [node.communicate(timeout=400)[0] for node in started]
    assert [node.returncode for node in started] == [0, 0, 0], shown
    (named,) = json.loads((folder / "preflight/report.json").read_text())["slow_links"]
    assert named.startswith("n2 to n3: 0.00")
    assert " GB/s, the others " in named


@pytest.mark.slow
@pytest.mark.torch
def test_a_rank_that_is_slow_in_its_node_is_named(tmp_path: Path, port: int) -> None:
    """As a GPU behind a bad PCIe link: slow to both of its neighbours."""
    folder = tmp_path / "run"
    plan = made(folder, port)
    plan["world"] |= {"nodes": NODES[:1], "ranks_per_node": 3, "size": 3}
    (folder / "plan.json").write_text(json.dumps(plan))
    node = start(folder, 0, SLOW_LINK)
    shown = node.communicate(timeout=400)[0]
    assert node.returncode == 0, shown
    report = json.loads((folder / "preflight/report.json").read_text())
    assert "neighbours in the node, round 3" in report["seconds"]
    (named,) = report["slow_links"]
    assert named.startswith("n1: rank 2 to both of its neighbours: 0.00")
