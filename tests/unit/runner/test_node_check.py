"""What each node checks by itself before the rendezvous, and how the others hear of it: real runners, real faults."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.checks import drivers, node_checks
from dray.contract import node
from dray.contract.findings import Finding
from dray.runner import preflight
from helpers import runs, until
from nodes import Start, decoded, ended

WANTED = {"timeout_s": 60, "megabytes": 1, "free_gb": 0.001, "shared_memory_gb": 0.001, "memory_gb": 0.001}
FABRIC = {"kind": "unknown", "transport": []}
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}  # a limit of files would cut it off


@pytest.fixture
def checked(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan of three nodes that check themselves."""
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    return plan | {"preflight": WANTED, "variant": "cpu", "fabric": FABRIC}


def refuse_writes(process: subprocess.Popen[str]) -> None:
    """As a quota that is nearly used up: records still fit, and what the check writes does not."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (16384, 16384))


def began(start: Start, *unfit: int) -> list[subprocess.Popen[str]]:
    nodes = [start(number, 3, f"node{number + 1}", **NO_BYTECODE) for number in range(3)]
    for number in unfit:
        refuse_writes(nodes[number])
    return nodes


@pytest.fixture
def several(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan of three nodes that check themselves."""
    plan["world"]["nodes"].append({"name": "node3", "address": "127.0.0.1"})
    plan |= {"preflight": WANTED, "variant": "cpu", "fabric": FABRIC}
    return plan


@pytest.mark.seconds
@pytest.mark.parametrize(
    "unfit",
    [
        pytest.param((1,), marks=pytest.mark.slow),
        pytest.param((0,), marks=pytest.mark.slow),
        (0, 2),
        pytest.param((0, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_all_that_are_unfit_are_named_at_once(
    several: dict[str, Any], start: Start, tmp_path: Path, unfit: tuple[int, ...]
) -> None:
    """On each node, in a file for sbatch --exclude, and each with a record of its own."""
    begun = time.monotonic()
    ends = [ended(one) for one in began(start, *unfit)]
    assert time.monotonic() - begun < several["world"]["rendezvous_timeout_s"] / 2, ends
    assert [code for code, _ in ends] == [69, 69, 69], ends
    names = [f"node{number + 1}" for number in unfit]
    assert (tmp_path / "failing_nodes.txt").read_text() == ",".join(names) + "\n"
    records = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "failures").iterdir()}
    assert sorted(records) == [f"node-{number}" for number in unfit]
    for number in unfit:
        record = records[f"node-{number}"]
        assert (record["code"], record["node"], record["rank"]) == (69, f"node{number + 1}", None)
        first, *_ = record["why"].splitlines()
        assert first == f"this node cannot write in {tmp_path / 'own'}; this node cannot write in {tmp_path}"
        assert f"found:  {os.strerror(errno.EFBIG)}" in record["why"]
        assert record["why"] in ends[number][1]
        assert f"dray: error: this node cannot write in {tmp_path}\n" in ends[number][1]
    for number in {0, 1, 2} - {*unfit}:
        assert f"{len(unfit)} of 3 nodes are unfit: {', '.join(names)}" in ends[number][1]
        assert f"{names[0]}: this node cannot write in" in ends[number][1]
    if 0 not in unfit:
        assert "fix:    leave them out: sbatch --exclude=$(cat failing_nodes.txt)" in ends[0][1]


@pytest.mark.slow
def test_a_node_that_does_not_come_is_told_beside_one_that_is_unfit(
    several: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    """It is not waited for as long as in a run that could begin."""
    several["world"]["rendezvous_timeout_s"] = 24
    begun = time.monotonic()
    first, second = start(0, 3, "node1"), start(1, 3, "node2", **NO_BYTECODE)
    refuse_writes(second)
    code, said = ended(first)
    assert (code, ended(second)[0], time.monotonic() - begun < 23) == (69, 69, True)
    assert "1 of 3 nodes are unfit: node2" in said
    assert "missing: node3" in said
    assert (tmp_path / "failing_nodes.txt").read_text() == "node2\n"


def test_one_node_alone(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    plan["world"]["nodes"].pop()
    plan |= {"preflight": {**WANTED, "memory_gb": 1e9}, "variant": "cpu", "fabric": FABRIC}
    code, said = ended(start(0, 1, "node1"))
    assert (code, "\nthe job has too little memory\n  wanted: 1000000000.0 GB" in said) == (69, True), said
    assert (tmp_path / "failing_nodes.txt").read_text() == "node1\n"
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["node-0.json"]


@pytest.mark.seconds
def test_an_unfit_node_whose_first_node_never_came(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:
    """Its own finding is why it ends."""
    plan["world"]["rendezvous_timeout_s"] = 2
    plan |= {"preflight": WANTED, "variant": "cpu", "fabric": FABRIC}
    second = start(1, 2, "node2", **NO_BYTECODE)
    refuse_writes(second)
    code, said = ended(second)
    assert (code, "could not reach" in said) == (69, False)
    assert json.loads((tmp_path / "failures/node-1.json").read_text())["why"] in said


HANGS = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    'print(\'{"part": "GPU 3", "phase": "%s"}\', flush=True)\ntime.sleep(600)'
)
UNFIT, UNWISE = (json.dumps({"finding": Finding("slow", found="hot", code=code)._asdict()}) for code in (69, 0))
READY = "print('{\"ready\": true}', flush=True); import time; time.sleep(600)"
LIMIT_S = 5.0  # in which a Python starts on a busy machine, too


def end(checks: preflight.Preflight) -> None:
    for rank in checks.ranks:
        rank.process.kill()
        with rank.process:  # closes its pipes
            pass


class TestRankChecks:
    """Processes that end in every way, before the rendezvous."""

    @pytest.fixture(autouse=True)
    def _plan(self, checked: dict[str, Any]) -> None:
        self.plan = checked

    def check(self, *codes: str, seconds: float = 60.0) -> tuple[Finding | None, dict[str, float]]:
        """The node's finding, and what was measured."""
        self.plan["world"]["rendezvous_timeout_s"] = int(2 * seconds)
        checks, measured = preflight.Preflight(decoded(self.plan)), dict[str, float]()
        for number, code in enumerate(codes, 3):
            argv = [sys.executable, "-S", "-E", "-c", code]
            checks.ranks.append(preflight.RankCheck(number, "node1", "logs/node-0.log", argv, os.environ))
        found = checks.check_node(measured)
        end(checks)
        return found, measured

    @pytest.mark.seconds
    def test_one_that_hangs_is_killed_and_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        begun = time.monotonic()
        found, _ = self.check(HANGS % "matmul", f"print('{UNWISE}', flush=True); {READY}", seconds=LIMIT_S)
        assert time.monotonic() - begun < LIMIT_S + 10
        assert found == Finding(
            "GPU 3: no answer within 5 s",
            wanted="a check that ends in time",
            found="in: matmul",
            fix="leave this node out (sbatch --exclude), and tell the administrators",
            code=69,
            node="node1",
        )
        assert "dray: warning: slow\n  found:  hot\n" in capsys.readouterr().out

    @pytest.mark.seconds
    def test_what_it_has_started_is_killed_too(self, tmp_path: Path) -> None:
        file = tmp_path / "process"
        child = f"import subprocess; open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        self.check(child + HANGS % "health", seconds=LIMIT_S)
        process = int(file.read_text())
        until(lambda: not runs(process))

    @pytest.mark.seconds
    def test_a_slow_disk_is_no_fault_of_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.check(HANGS % preflight.LOADING, seconds=LIMIT_S) == (None, {})
        said = capsys.readouterr().out
        assert "dray: warning: GPU 3 is not checked: import torch was not done within 5 s\n" in said

    def test_all_are_waited_for_and_all_findings_are_the_node_s(self, capsys: pytest.CaptureFixture[str]) -> None:
        found, _ = self.check(READY, f"print('{UNFIT}', flush=True); raise SystemExit(69)", "import os; os.abort()")
        problem = "slow; rank 5: the check ended: killed by SIGABRT"
        assert found == Finding(problem, found="hot", code=69, node="node1")
        assert "dray: error: rank 5: the check ended: killed by SIGABRT\n" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("ends", "how", "found"),
        [
            ("os.kill(os.getpid(), 11)", "killed by SIGSEGV", "in: device"),
            (
                'print(\'{"why": "ImportError: libx.so"}\'); sys.exit(1)',
                "exit code 1",
                "in: device: ImportError: libx.so",
            ),
            ("os._exit(0)", "exit code 0", "in: device"),
        ],
    )
    def test_one_that_ends(self, ends: str, how: str, found: str) -> None:
        begin = 'import os, sys; print(\'{"part": "GPU 3", "phase": "device"}\', flush=True)'
        finding, _ = self.check(f"{begin}\n{ends}", READY)
        assert finding
        assert (finding.problem, finding.found, finding.code) == (f"GPU 3: the check ended: {how}", found, 69)

    @pytest.mark.parametrize("line", ["welcome", "[1]", "7", "null", '"x"', '{"finding": 3}', '{"finding": {"a": 1}}'])
    def test_what_no_check_tells_is_for_the_log(self, capsys: pytest.CaptureFixture[str], line: str) -> None:
        assert self.check(f"print({line!r}, flush=True); {READY}") == (None, {})
        assert f"dray: rank 3: {line}\n" in capsys.readouterr().out

    @pytest.mark.parametrize(("ready", "node"), [("", "node1"), (READY.partition(";")[0], "")])
    def test_what_a_rank_finds_alone_is_its_node_s_also_if_it_comes_late(self, ready: str, node: str) -> None:
        """What it finds with the others may be the fault of any node."""
        argv = [sys.executable, "-S", "-E", "-c", f"{ready}\nprint('{UNFIT}', flush=True)"]
        rank = preflight.RankCheck(3, "node1", "logs/node-0.log", argv, os.environ)
        with rank.process:
            rank.process.wait()
            rank.hear()
        assert [found.node for found in rank.report.findings] == [node]

    def test_one_that_ends_while_it_waits_is_not_reaped(self) -> None:
        """Else nobody would notice that it has ended, and its number may be another's."""
        waits, works = READY.partition(";")[0], f"import time; time.sleep(1); {READY}"
        self.plan["world"]["rendezvous_timeout_s"] = 120
        checks = preflight.Preflight(decoded(self.plan))
        for code in (waits, works):
            argv = [sys.executable, "-S", "-E", "-c", code]
            checks.ranks.append(preflight.RankCheck(3, "node1", "logs/node-0.log", argv, os.environ))
        assert checks.check_node({}) is None
        assert checks.ranks[0].process.returncode is None
        end(checks)

    def test_the_slowest_gpu_is_the_node_s(self) -> None:
        told = ('{"tflops": 612.5}', '{"tflops": 590.25}', '{"phase": "device"}')
        assert self.check(*(f"print({line!r}, flush=True); {READY}" for line in told)) == (None, {"tflops": 590.25})


def names(plan: dict[str, Any]) -> list[str]:
    return [name for name, _ in node_checks.checks(plan)]


def test_what_is_looked_at(several: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    every = [
        "shared memory", "room in /tmp", "the node's own folder", "room in the run folder", "the run folder", "memory",
    ]  # fmt: skip
    assert names(several) == every
    assert names(several | {"variant": "rocm6"}) == [*every, "locked memory", "RDMA cards"]
    network = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    for variable in network:
        monkeypatch.setenv(variable, "lo")
    assert names(several) == [*every, "GLOO_SOCKET_IFNAME"]
    assert names(several | {"variant": "rocm6"}) == [*every, *network, "locked memory", "RDMA cards"]
    for variable in network:
        monkeypatch.delenv(variable)
    assert names(several | {"variant": "cuda12"}) == [*every, "locked memory", "RDMA cards", "the kernel's log"]
    slingshot = {"variant": "rocm", "fabric": {"kind": "slingshot"}}
    assert names(several | slingshot) == [*every, "locked memory"]


@pytest.mark.parametrize(
    ("variant", "kind", "nodes", "limit", "level"),
    [
        ("cuda", "infiniband", 2, 8 << 20, "error"),
        ("rocm", "slingshot", 2, 65536, "error"),
        ("cuda", "infiniband", 2, resource.RLIM_INFINITY, None),
        ("cuda", "infiniband", 2, 64 << 30, None),
        ("cuda", "infiniband", 1, 8 << 20, "warning"),
        ("cuda", "unknown", 2, 8 << 20, "warning"),
        ("cuda", "ethernet", 2, 0, "warning"),
        ("cpu", "infiniband", 2, 8 << 20, None),
    ],
)
def test_a_limit_of_locked_memory_that_rdma_cannot_live_with(
    several: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    kind: str,
    nodes: int,
    limit: int,
    level: str,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    several["world"]["nodes"] = several["world"]["nodes"][:nodes]
    plan = several | {"variant": variant, "fabric": {"kind": kind, "transport": []}}
    found = [
        one
        for name, look in node_checks.checks(plan)
        if name == "locked memory"
        for one in node_checks.findings(name, look)
    ]
    assert [one.level for one in found] == ([level] if level else [])
    for one in found:
        assert (one.problem, one.wanted) == (
            "the limit of locked memory is too small for RDMA", "unlimited (ulimit -l)"
        )  # fmt: skip
        assert "LimitMEMLOCK=infinity" in one.fix


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ""),
        ("GLOO_SOCKET_IFNAME", "lo,eth0", ""),
        ("GLOO_SOCKET_IFNAME", "ib0", "ib0"),
        ("GLOO_SOCKET_IFNAME", "eth", "eth"),  # gloo takes whole names
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "ib0"),
        ("NCCL_SOCKET_IFNAME", "eth", ""),
        ("NCCL_SOCKET_IFNAME", "ib,eth", ""),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", ""),
        ("NCCL_SOCKET_IFNAME", "=eth0", ""),
        ("NCCL_SOCKET_IFNAME", "=eth", "eth"),
        ("NCCL_SOCKET_IFNAME", "hsn,ib", "hsn ib"),
    ],
)
def test_a_network_variable_that_names_no_interface(variable: str, value: str, missing: str) -> None:
    found = node.interfaces(variable, value, ["lo", "eth0"])
    assert found.code == (69 if missing else 0)
    if missing:
        assert (found.problem, found.wanted, found.found) == (
            f"{variable}={value} names no network interface of this node",
            "an interface of this node: lo eth0",
            missing,
        )


def test_a_wrong_network_variable_is_named_before_any_rank_starts(
    several: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    """By all nodes, with the interfaces that there are; NCCL's on nodes with GPUs alone."""
    wrong = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    ends = [ended(one) for one in [start(number, 3, f"node{number + 1}", **wrong) for number in range(3)]]
    assert [code for code, _ in ends] == [69, 69, 69], ends
    why = json.loads((tmp_path / "failures" / "node-0.json").read_text())["why"]
    assert why.splitlines()[0] == "GLOO_SOCKET_IFNAME=ib0 names no network interface of this node"
    assert "fix:    leave out GLOO_SOCKET_IFNAME, or name one of these (env.GLOO_SOCKET_IFNAME in the recipe" in why
    assert "an interface of this node: lo" in why


def test_a_folder_that_is_gone() -> None:
    (found,) = node_checks.findings("room in the run folder", lambda: node.free_space("/no/such", 1.0))
    assert (found.problem, found.code) == ("room in the run folder: the check failed", 69)
    assert found.found == f"[Errno {errno.ENOENT}] {os.strerror(errno.ENOENT)}: '/no/such'"
    written = node.writable("/proc/self")
    assert (written.problem, written.code) == ("this node cannot write in /proc/self", 69)


@pytest.mark.skipif(os.geteuid() != 0, reason="root makes the small disk")
@pytest.mark.parametrize("which", ["shm", "room", "full"])
def test_a_node_without_room_is_unfit(tmp_path: Path, which: str) -> None:
    """64 MB of shared memory, as Docker gives by default; a disk of the node's own that is small; one that is full."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "dray-test", small], check=True)
    try:
        if which == "full":
            subprocess.run(["dd", "if=/dev/zero", f"of={small}/all", "bs=1M"], capture_output=True, check=False)
        looks = {
            "shm": lambda: node.shared_memory(0.5, str(small)),
            "room": lambda: node.free_space(str(small), 0.1),
            "full": lambda: node.writable(str(small)),
        }
        found = looks[which]()
        left = sorted(path.name for path in small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)
    assert (found.problem, found.found) == {
        "shm": (f"{small} is too small", "0.067 GB"),
        "room": (f"{small} is full", "0.067 GB"),
        "full": (f"this node cannot write in {small}", os.strerror(errno.ENOSPC)),
    }[which]
    assert (found.code, left) == (69, ["all"] if which == "full" else [])


class TestMemory:
    """/proc and cgroups as they are in a job of Slurm's."""

    def groups(self, tmp_path: Path, files: dict[str, str]) -> str:
        for name, text in files.items():
            (tmp_path / "g" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "g" / name).write_text(text)
        return str(tmp_path / "g")

    def own(self, tmp_path: Path, text: str) -> str:
        (tmp_path / "own").write_text(text)
        return str(tmp_path / "own")

    def look(self, tmp_path: Path, own: str, files: dict[str, str], wanted: float = 1.0) -> Finding:
        (tmp_path / "meminfo").write_text("MemTotal:  16000000 kB\nMemAvailable:    8000000 kB\n")
        return node.memory(
            wanted, str(tmp_path / "meminfo"), self.own(tmp_path, own), self.groups(tmp_path, {"x": "", **files})
        )

    def test_the_lowest_limit_above_it(self, tmp_path: Path) -> None:
        own = "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n"
        job = "system.slice/slurmstepd.scope/job_17"
        files = {f"{job}/memory.max": "500000000\n", f"{job}/step_0/memory.max": "max\n"}
        found = self.look(tmp_path, own, files)
        assert (found.code, found.found) == (69, "0.500 GB allowed by the job's cgroup")
        assert found.fix.startswith("ask Slurm for more: --mem=SIZE")

    def test_version_1(self, tmp_path: Path) -> None:
        own = "9:memory:/slurm/uid_1000/job_17\n4:cpu,cpuacct:/slurm\n"
        files = {"memory/slurm/uid_1000/job_17/memory.limit_in_bytes": "700000000\n"}
        files |= {"memory/memory.limit_in_bytes": "9223372036854771712\n"}
        assert self.look(tmp_path, own, files).found == "0.700 GB allowed by the job's cgroup"

    @pytest.mark.parametrize("own", ["", "0::/\n", "rubbish\n\n::\n", "0::/../../etc\n"])
    def test_without_a_limit_what_is_available_counts(self, tmp_path: Path, own: str) -> None:
        assert self.look(tmp_path, own, {}).found == "8.192 GB available"
        assert node.memory_limit(self.own(tmp_path, own), self.groups(tmp_path, {})) is None
        found = self.look(tmp_path, own, {}, wanted=9.0)
        assert (found.code, found.wanted) == (69, "9.0 GB (preflight.memory_gb)")
        assert "leave this node out" in found.fix

    def test_here(self) -> None:
        assert node.memory(0.001).level == "ok"


def test_errors_in_the_kernel_s_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "6,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=2, GPU has fallen off the bus.\n"
        "6,3,3,-;NVRM: Xid (PCI:0000:86:00): 31, pid=3, an error of the program\n"
    )
    (found,) = node.xids(str(log))
    assert (found.problem, found.found, found.level) == (
        "the kernel's log has Xid 79 of the GPU at 0000:3b:00", "the GPU has fallen off the bus", "warning",
    )  # fmt: skip
    assert node.xids(str(tmp_path / "none")) == []


ECC, PAGES, CLOCKS = "ecc.errors.uncorrected.volatile.total", "retired_pages.pending", "clocks_throttle_reasons.active"
FAILED, PENDING = "remapped_rows.failure", "remapped_rows.pending"
FINE = {ECC: "0", PAGES: "No", CLOCKS: "0x0000000000000001", FAILED: "No", PENDING: "No"}


@pytest.mark.parametrize(
    ("told", "problem", "level"),
    [
        ({}, None, None),
        ({ECC: "[N/A]", PAGES: "[N/A]", FAILED: "", PENDING: "", CLOCKS: ""}, None, None),
        ({ECC: "[Not Supported]"}, None, None),
        ({CLOCKS: "0x0000000000000004"}, None, None),  # the power limit, which every busy GPU comes to
        ({CLOCKS: "Active"}, None, None),
        ({FAILED: "Yes"}, "a row of its memory cannot be remapped", "error"),
        ({PENDING: "Yes"}, "its memory has errors, and it has not been reset since", "error"),
        ({PAGES: "Yes"}, "its memory has errors, and it has not been reset since", "error"),
        ({ECC: "3"}, "its memory had errors that ECC did not correct", "warning"),
        ({CLOCKS: "0x0000000000000048"}, "it is slower than it should be", "warning"),
    ],
)
def test_what_nvidia_smi_tells(told: dict[str, str], problem: str | None, level: str | None) -> None:
    found = list(drivers.nvidia_health({**FINE, **told}))
    assert [(one.problem, one.level) for one in found] == ([(problem, level)] if problem else [])


SMI = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
  *remapped_rows.failure*) echo 'Field "remapped_rows.failure" is not a valid field to query.'; exit 2 ;;
  *remapped_rows.pending*) echo No ;;
  *ecc*) echo 2 ;;
  *) echo "[N/A]" ;;
esac
"""


def test_each_field_is_asked_for_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not know one answers to none of that call."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    about = type("Properties", (), {"uuid": "1f2e-3d", "pci_bus_id": 59})()
    (found,) = drivers.health(about)
    assert found.found.startswith("2 since the driver was loaded")
    ends = [f"--{one}" for one in (
        "query-gpu=ecc.errors.uncorrected.volatile.total", "query-gpu=retired_pages.pending",
        "query-gpu=clocks_throttle_reasons.active", "query-remapped-rows=remapped_rows.failure",
        "query-remapped-rows=remapped_rows.pending",
    )]  # fmt: skip
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"--id=GPU-1f2e-3d {end} --format=csv,noheader,nounits" for end in ends]


@pytest.mark.parametrize(
    ("text", "seen"), [("ue: 4\nce: 9\n", True), ("ue: 0\nce: 9\n", False), ("", False), ("ue: x\n", False)]
)
def test_what_amdgpu_counts(tmp_path: Path, text: str, seen: bool) -> None:
    (tmp_path / "umc_err_count").write_text(text)
    assert bool(list(drivers.amd_health(tmp_path / "umc_err_count"))) == seen
    assert list(drivers.amd_health(tmp_path / "none")) == []


@pytest.mark.seconds
@pytest.mark.torch
def test_without_a_gpu_the_node_is_unfit(
    several: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the real check of a GPU, with a torch that has none."""
    several["variant"] = "cuda"
    (tmp_path / "plan.json").write_text(json.dumps(several))
    (tmp_path / "own").mkdir()
    checks = preflight.Preflight(decoded(several, 1))
    checks.start()
    found = checks.check_node({})
    end(checks)
    assert found
    assert (found.code, found.node, found.problem) == (
        69,
        "node2",
        "; ".join(f"GPU {gpu}: torch does not see this GPU" for gpu in (0, 1)),
    )
    assert (
        "dray: error: GPU 1: torch does not see this GPU\n  wanted: 2 GPUs, one for each rank\n"
        in capfd.readouterr().out
    )


@pytest.mark.torch
def test_a_gpu_goes_through_these_phases(several: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device = pytest.importorskip("dray.checks.device")
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device.torch.cuda, "get_device_properties", lambda _: None)
    for name in ("driver", "works", "right", "memory"):
        monkeypatch.setattr(device, name, lambda *_: "")
    monkeypatch.setattr(device, "ceiling", lambda _: 512.345)
    monkeypatch.setattr(device.drivers, "health", lambda _: [Finding("slow", found="hot")])
    told: list[Any] = []
    rank = SimpleNamespace(plan=several, local=1, report=told.append, tell=lambda **fields: told.append(fields))
    device.of_rank(rank)
    phases = [{"phase": name} for name in ("driver", "device", "products", "memory", "matmul", "health")]
    assert told == [*phases[:5], {"tflops": 512.3}, phases[5], Finding("GPU 1: slow", found="hot")]


@pytest.mark.torch
def test_the_products_and_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pytest.importorskip("dray.checks.device")
    monkeypatch.setattr(device.torch.cuda, "mem_get_info", lambda _: (2 << 20, 4 << 20))
    assert device.right("cpu") == "right in fp32, fp16 and bf16"
    assert device.memory("cpu", 1 << 20).endswith("GiB free")
