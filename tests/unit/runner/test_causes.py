"""Names of causes: by real failures where this machine can have them, and by the libraries' own messages elsewhere."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.contract import failures, run_folder
from dray.contract.findings import Finding
from dray.runner import rank as rank_module
from dray.runner import records
from dray.runs import finish, status
from dray.runs.result import UNKNOWN, Cause
from helpers import PYTHON

RANK = Path(rank_module.__file__)


EXCEPTION = "a Python exception"


def cause(*lines: str, code: int = 1, why: str = "", seen: tuple[str, ...] = ()) -> Cause:
    why = why or f"exit code {code}"
    return Cause(node="n1", rank=0, code=code, why=why, log=None, last_lines=list(lines), evidence=list(seen))


def failed(folder: Path, *command: str, rank: Path = RANK, before: str = "0", prefix: tuple[str, ...] = ()) -> Cause:
    """What a real rank has recorded, by its name."""
    (folder / run_folder.LOGS).mkdir(exist_ok=True)
    env = {**PYTHON, "RANK": "0", "WORLD_SIZE": "1", records.OOM_KILLS_BEFORE: before}
    argv = [*prefix, sys.executable, "-S", "-E", str(rank), str(folder), "1", "n1", *command]
    ended = subprocess.run(argv, env=env, check=False, timeout=60)
    record = json.loads((folder / run_folder.failure("rank-0")).read_text())
    assert record["code"] == ended.returncode
    return finish.named_cause(Cause.model_validate(record))


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


class TestReal:
    """Each is what this machine's own kernel, Python and C library say."""

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("code", "name", "ended"),
        [
            ("import no_such_module", "a Python import failed", 1),
            ("from os import no_such_name", "a Python import failed", 1),
            ("open('/dev/full', 'w').write('x' * 99999)", "the disk is full", 1),
            ("bytearray(1 << 60)", "out of memory on the host", 1),
            ("import ctypes; ctypes.string_at(0)", "segmentation fault", 139),
            (
                "import mmap; f = open('here', 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); f.truncate(); m[0]",
                "bus error",
                135,
            ),
            (
                "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_server(s.getsockname())",
                "a port is in use",
                1,
            ),
            ("import os; raise OSError(122, os.strerror(122), '/home/me/x')", "disk quota exceeded", 1),
            ("import os; os.kill(os.getpid(), 9)", UNKNOWN, 137),
            ("raise SystemExit(3)", UNKNOWN, 3),
            ("import os; os.abort()", UNKNOWN, 134),
            ("raise SystemExit(78)", "the configuration is wrong", 78),
        ],
    )
    def test_a_program_that_fails(self, tmp_path: Path, monkeypatch, code: str, name: str, ended: int) -> None:
        monkeypatch.chdir(tmp_path)
        found = failed(tmp_path, *python(code))
        assert (found.name, found.code, bool(found.fix)) == (name, ended, name != UNKNOWN)
        assert found.evidence[-2].startswith("disk of the run folder: ") or "kernel log" in found.evidence[-1]

    def test_a_program_that_is_not_there(self, tmp_path: Path) -> None:
        assert failed(tmp_path, "/no/such/program").name == "the program cannot be started"

    def test_a_disk_that_is_full(self, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("only root may mount a disk")
        try:
            found = failed(tmp_path, *python(f"open({str(disk / 'x')!r}, 'w').write('x' * 99999)"))
            assert found.name == "the disk is full"
        finally:
            subprocess.run(["umount", disk], check=True)

    def test_a_file_that_its_server_has_forgotten(self, tmp_path: Path) -> None:
        code = (
            "import ctypes, os\n"
            "libc, handle = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(136)\n"
            "mount = ctypes.c_int()\n"
            "handle[0] = 128\n"
            "open('gone', 'w').close()\n"
            "assert not libc.name_to_handle_at(-100, b'gone', handle, ctypes.byref(mount), 0), 'skip'\n"
            "os.unlink('gone')\n"
            "assert libc.open_by_handle_at(os.open('.', os.O_RDONLY), handle, 0) < 0\n"
            "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"
        )
        found = failed(tmp_path, "sh", "-c", f"cd {shlex.quote(str(tmp_path))}; {shlex.join(python(code))}")
        if "skip" in found.last_lines[-1] or "Operation not permitted" in found.last_lines[-1]:
            pytest.skip("only root opens files by their handles, and not on every disk")
        assert found.name == "stale file handle"

    def test_an_image_whose_mount_is_killed_under_the_rank(self, tmp_path: Path) -> None:
        """The supervisor cannot load what writes records any more, and leaves one all the same."""
        tree, mount = tmp_path / "tree", tmp_path / "mount"
        for part in ("contract", "runner"):
            (tree / "dray" / part).mkdir(parents=True)
            for source in (RANK.parents[1] / part).glob("*.py"):
                (tree / "dray" / part / source.name).write_bytes(source.read_bytes())
        (tree / "dray" / "__init__.py").touch()
        mount.mkdir()
        try:
            subprocess.run(["mksquashfs", tree, tmp_path / "image", "-quiet", "-no-progress"], check=True)
            fuse = subprocess.Popen(["squashfuse", "-f", tmp_path / "image", mount], stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            pytest.skip("squashfuse and mksquashfs are not installed")
        try:
            while not (mount / "dray").exists():
                if fuse.poll() is not None:
                    pytest.skip("FUSE does not mount here")
                time.sleep(0.02)
            command = (
                "sh",
                "-c",
                f"kill -9 {fuse.pid}; while ls {shlex.quote(str(mount))}; do sleep 0.02; done; exit 3",
            )
            found = failed(tmp_path, *command, rank=mount / "dray" / "runner" / "rank.py")
        finally:
            fuse.kill()
            fuse.wait()
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
        assert (found.name, found.code, found.node) == ("the image's mount went away", 75, "n1")
        assert found.why.startswith("exit code 3; the image is gone: ")


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """One of 48 MB, of either version."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"dray-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(48 << 20))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no cgroup with a memory limit can be made here")


def test_a_kill_without_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.node, "memory_limit", lambda: None)
    monkeypatch.setattr(records, "_new_oom_kills", lambda: 1)
    assert records._memory_kills() == ["memory cgroup: oom_kill rose by 1 since the ranks were started"]


def test_a_memory_limit_that_is_reached(tmp_path: Path, memory_cgroup: Path) -> None:
    enter = ("sh", "-c", f'echo $$ >{memory_cgroup}/cgroup.procs; exec "$@"', "sh")
    found = failed(tmp_path, *python("x = bytearray(400 << 20)"), prefix=enter)
    assert (found.code, found.name) == (137, "out of memory on the host")
    assert found.evidence[0] == (
        "memory cgroup: oom_kill rose by 1 since the ranks were started; its limit is 0.050 GB"
    )
    told = [line for line in found.evidence if line.startswith("kernel log: ")]
    if told:  # where this user may read it
        assert any("oom-kill:" in line or "out of memory: Killed process" in line for line in told)
        (tmp_path / "again").mkdir()
        assert finish.named_cause(found.model_copy(update={"evidence": told})).name == found.name
    # A kill of another sort, in the same cgroup and just after: neither the counter nor the kernel's log is of it.
    killed = failed(tmp_path, *python("import os; os.kill(os.getpid(), 9)"), before="1", prefix=enter)
    assert (killed.code, killed.name) == (137, UNKNOWN)


@pytest.mark.parametrize(("killed", "kept"), [(None, "own"), (1, "own"), (0, "")])
def test_whose_kills_in_the_kernel_s_log_are_evidence(monkeypatch, killed: int | None, kept: str) -> None:
    """Without a counter, those of this user's processes."""
    stamp = "<4>[9999999999.000000]"
    users = {"own": os.getuid(), "other": os.getuid() + 1}
    log = "".join(f"{stamp} oom-kill:task={name},pid=2,uid={uid}\n" for name, uid in users.items())
    log += f"{stamp} NVRM: Xid (PCI:0000:3b:00): 79\n"

    def read(_: int, buffer: ctypes.Array, _size: int) -> None:
        buffer.value = log.encode()

    monkeypatch.setattr(records.ctypes, "CDLL", lambda _: SimpleNamespace(klogctl=read))
    monkeypatch.setattr(records, "_new_oom_kills", lambda: killed)
    *kills, xid = records._kernel_log()
    assert "Xid" in xid
    assert [line.partition("task=")[2].partition(",")[0] for line in kills] == kept.split()


def test_what_was_killed_before_the_ranks_were_started_is_no_evidence(monkeypatch) -> None:
    monkeypatch.setattr(records, "oom_kills", lambda: "5")
    for before, lines in (("5", 0), ("4", 1), ("", 0), ("9", 0)):
        monkeypatch.setenv(records.OOM_KILLS_BEFORE, before)
        assert len(records._memory_kills()) == lines


OOM = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of "
    "14.57 GiB of which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in use. Of the allocated memory 734.07 "
    "MiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch but unallocated."
)


def test_what_torch_held_is_kept_although_the_log_goes_on(tmp_path: Path) -> None:
    found = failed(tmp_path, "sh", "-c", f"echo {shlex.quote(OOM)}; seq 99; exit 1")
    assert found.evidence[0] == f"GPU memory: {OOM[33:]}"
    assert found.name == UNKNOWN  # it may have been caught: nothing of it is in the last lines
    said = failed(tmp_path, "sh", "-c", f"echo {shlex.quote(OOM)}; exit 1")
    assert (said.name, said.evidence[0]) == ("out of memory on the GPU", f"GPU memory: {OOM[33:]}")


# The libraries' own messages, from their sources, issues and users' logs.
QUOTED = [
    (OOM, "out of memory on the GPU"),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has", "out of memory on the GPU"),
    ("NCCL WARN Cuda failure 2 'out of memory'", "out of memory on the GPU"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to "
     "allocate 4611686018427387904 bytes. Error code 12 (Cannot allocate memory)", "out of memory on the host"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=18835145.0. Some of the step tasks have been OOM Killed.",
     "out of memory on the host"),
    ("[rank0]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation "
     "timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072, NumelOut=131072, Timeout(ms)=600000) ran for 60008 "
     "milliseconds before timing out.", "a collective timed out"),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
     "operation to complete", "a collective timed out"),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2",
     "another rank ended first"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver",
     "the driver does not fit the image"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device",
     "the driver does not fit the image"),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
     "are out of shared memory. Please try to raise your shared memory limit.", "shared memory is too small"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
     "shared memory is too small"),
    ("Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 106), error: No space left on device (28)",
     "shared memory is too small"),
    ("RuntimeError: unable to write to file </torch_2034_34123_0>: No space left on device (28)",
     "shared memory is too small"),
    ("SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)", "the disk is full"),
    ("OSError: [Errno 107] Transport endpoint is not connected: '/data/x'", "a mounted file system went away"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal memory access on the GPU"),
    ("Memory access fault by GPU node-1 (Agent handle: 0x55ac14d27600) on address 0x7f9587e00000. Reason: Page not "
     "present or supervisor privilege.", "illegal memory access on the GPU"),
    ("RuntimeError: CUDA error: device-side assert triggered", "an assertion in a GPU's kernel"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "a GPU failed"),
    ("ImportError: libcudart.so.13: cannot open shared object file: No such file", "a Python import failed"),
    ("[rank1]: ModuleNotFoundError: No module named 'trl'", "a Python import failed"),
    ("/usr/bin/python3: No module named nosuchmodule", "a Python import failed"),
    ("/opt/venv/bin/python: Error while finding module specification for 'x.y' (ModuleNotFoundError: No module named "
     "'x')", "a Python import failed"),
    ("/opt/conda/bin/python3.11: Error while finding module specification for 'accelerate.commands.launch' "
     "(ModuleNotFoundError: No module named 'accelerate')", "the launcher is not in the image"),
    ("/usr/bin/python3: No module named deepspeed", "the launcher is not in the image"),
    ("ModuleNotFoundError: No module named 'accelerate'", "a Python import failed"),
    ("RuntimeError: Distributed package doesn't have NCCL built in", "the image has no NCCL"),
    ("[rank1]: OSError: [Errno 30] Read-only file system: '/shared/home/.cache'", "a read-only folder"),
    ("ConnectionError: Couldn't reach 'nosuch/thing' on the Hub (OfflineModeIsEnabled)",
     "offline, and not in the cache"),
    ("FileNotFoundError: Couldn't find a module script at /work/accuracy/accuracy.py. Module 'accuracy' doesn't exist "
     "on the Hugging Face Hub either.", "offline, and not in the cache"),
    ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
     "the loss is not finite"),
    ("the loss is not finite any more", "the loss is not finite"),
    ("slurmstepd: error: *** STEP 17.0 ON n1 CANCELLED AT 2026-09-30T16:00:24 DUE TO TIME LIMIT ***", "time limit"),
    ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-09-30T16:00:24 DUE TO PREEMPTION ***", "preemption"),
    ("srun: error: Node failure on n2", "node failure"),
    ("slurmstepd: error: *** STEP 17.0 ON n1 CANCELLED AT 2026-09-30T16:00:24 ***", UNKNOWN),
    ("all is well", UNKNOWN),
    ("ValueError: hang on", EXCEPTION),
    ("[rank3]: KeyError: 'labels'", EXCEPTION),
    ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", UNKNOWN),
    ("AssertionError", EXCEPTION),
    ("after 3 tries: ValueError: caught, and told", UNKNOWN),
    ("the text of this recipe is about running out of memory, hanging and full disks", UNKNOWN),
]  # fmt: skip


def test_the_runner_itself_dies_of_the_mount() -> None:
    """As bash tells of it in the node's log."""
    line = '/shared/my runs/r/attempt-1/./node.sh: line 54:  8968 Bus error               "$@"'
    found = finish.named_cause(cause("before", line, "after", code=135))
    assert (found.name, found.code) == ("the image's mount went away", 75)
    assert finish.named_cause(cause(line)).name == UNKNOWN


@pytest.mark.parametrize(("line", "name"), QUOTED, ids=[line[:50] for line, _ in QUOTED])
def test_a_line_of_a_library(line: str, name: str) -> None:
    assert finish.named_cause(cause("before", line, "after")).name == name


XID = "kernel log: [ 1092.439831] NVRM: Xid (PCI:0000:3b:00): {}, pid=7, name=python, GPU has an error."
GONE = "RuntimeError: DataLoader worker (pid(s) 4237, 4238) exited unexpectedly"
EVIDENCE = [
    (135, "", ("/dev/shm: 0.000 GB free of 0.067 GB",), "shared memory is too small"),
    (135, "", ("/dev/shm: 12.000 GB free of 25.277 GB",), "bus error"),
    (135, "", ("the image cannot be read any more: Transport endpoint is not connected: /usr/bin/python3",),
     "the image's mount went away"),
    (135, "", ("disk of the run folder: 0.000 GB free of 9.000 GB",), "the disk is full"),
    (1, "CUDA error: unspecified launch failure", (XID.format(79),), "a GPU failed"),
    (1, "CUDA error: unspecified launch failure", (XID.format(31),), UNKNOWN),  # of the program, mostly
    (1, "ValueError: x", (XID.format(79),), EXCEPTION),
    (1, "HIP error: unspecified launch failure",
     ("kernel log: [  92.1] amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",), "a GPU failed"),
    (137, "", ("kernel log: [ 92.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python3,pid=2,uid=0",),
     "out of memory on the host"),
    (137, "", ("Slurm: slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.",), "out of memory on the host"),
    (1, "", ("memory cgroup: oom_kill rose by 1 since the ranks were started",), UNKNOWN),
    (143, "", ("Slurm: slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***",), "time limit"),
    (69, "", (), "a node is unfit"),
    (1, GONE, ("log: DataLoader worker (pid 7) is killed by signal: Bus error. It is",), "shared memory is too small"),
    (1, GONE, ("log: DataLoader worker (pid 7) is killed by signal: Killed. ",), UNKNOWN),
    (1, GONE, ("memory cgroup: oom_kill rose by 1 since the ranks were started",), "out of memory on the host"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "line", "seen", "name"), EVIDENCE)
def test_what_the_node_saw(code: int, line: str, seen: tuple[str, ...], name: str) -> None:
    assert finish.named_cause(cause(line, code=code, seen=seen)).name == name


@pytest.mark.parametrize("why", ["hang: no step within 300 s", "rank 3 on n2: hang: all_reduce", "hung in all_reduce"])
def test_a_hang(why: str) -> None:
    assert finish.named_cause(cause(why=why, code=75)).name == "hang"


def test_a_node_that_was_lost() -> None:
    wrong = "GLOO_SOCKET_IFNAME=ib0 names no network interface of this node\n  wanted: x"
    assert finish.named_cause(cause(why=wrong, code=69)).name == "a network variable names no interface"
    assert finish.named_cause(cause(why="node 1 (n2) is gone\n  wanted: x", code=75)).name == "node failure"


def test_why_a_job_was_stopped() -> None:
    """All that runs/status.py can say has a name of its own."""
    told = {state: finish.cause_of_reason(reason) for state, reason in status._BY_STATE.items()}
    assert {state: found.get("name") for state, found in told.items()} == {
        "TIMEOUT": "time limit", "PREEMPTED": "preemption", "NODE_FAIL": "node failure",
        "DEADLINE": "the job's deadline", "CANCELLED": "cancelled", "OUT_OF_MEMORY": "out of memory on the host",
    }  # fmt: skip
    assert finish.cause_of_reason("SIGSYS") == {}
    assert (
        status.reason_of_state("CANCELLED by 1000"),
        status.reason_of_state("FAILED"),
        status.reason_of_state(""),
    ) == (
        "scancel",
        "",
        "",
    )


def test_every_cause_has_a_fix_and_every_sign_a_source_without_a_host() -> None:
    known = finish.known_causes()
    assert len({one.name for one in known}) == len(known)
    for one in known:
        assert one.fix
        for sign in one.sign:
            assert sign.source
            assert not re.search(r"://|www\.|\.(?:org|com|io)\b", f"{sign.source} {one.fix}")
            assert sign.why or sign.lines or sign.evidence or sign.codes or sign.reason


HOSTILE_LINES = {
    "one letter": "a", "spaces": " ", "digits": "9", "quotes": "'", "brackets": "(", "colons": ": ", "NUL": "\0",
    "CUDA": "CUDA error: ", "workers": "DataLoader worker (pid ", "slurmstepd": "slurmstepd: error: ",
    "shared memory": "unable to write to /torch_ ", "kernel": "kernel log: NVRM: Xid (PCI:0000): ",
    "amdgpu": "kernel log: amdgpu ring ", "letters": "\u00e9\u202e\U0001f600",
}  # fmt: skip


@pytest.mark.hostile("why")
@pytest.mark.parametrize("piece", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_no_line_takes_a_pattern_long(piece: str) -> None:
    lines = [piece * (20000 // len(piece))] * 20
    before = time.process_time()
    assert finish.named_cause(cause(*lines, seen=tuple(line[:1000] for line in lines), code=137)).name == UNKNOWN
    for pattern in (records._TELLING, *records._LOGGED.values()):
        pattern.search(piece * 2000)
    assert time.process_time() - before < 5


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.torch
@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("torch.empty(1 << 60, dtype=torch.uint8)", "out of memory on the host"),
        ("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')", "out of memory on the GPU"),
        (
            "class Data(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 2\n"
            "    def __getitem__(self, number): os.kill(os.getpid(), 7)\n"
            "list(torch.utils.data.DataLoader(Data(), num_workers=1))",
            "shared memory is too small",
        ),
    ],
)
def test_torch_itself(tmp_path: Path, code: str, name: str) -> None:
    pytest.importorskip("torch")
    assert failed(tmp_path, *python(f"import os, torch\n{code}")).name == name


SERVER = "[W1126 18:05:57.068193087 WorkerServer.cpp:113] [c10d] Server listening to UNIX /tmp/x/beat-0.socket"
WARNED = ["/opt/x/torch/y.py:7: FutureWarning: `a` is deprecated", "  warnings.warn("]
TRAINER = "1 rank on 1 host, 1,040,896 parameters, 189,633 tokens"
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"
TRACEBACK = ["Traceback (most recent call last):", '  File "/work/train.py", line 3, in <module>', "    main()", CLOSED]
FINDING = ["the token cache is open to other users", "  wanted: a folder of your own", "  found:  mode 777"]


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ([SERVER, TRAINER, "  two words"], FINDING),
        ([SERVER, TRAINER], [*FINDING, SERVER]),
        ([SERVER, *WARNED, TRAINER], TRACEBACK),
        ([f"[rank0]:{SERVER}", TRAINER], [f"[rank0]: {line}" for line in TRACEBACK]),
        ([SERVER, TRAINER], [*TRACEBACK, "", "The above exception was the direct cause of", "", *TRACEBACK]),
        (["    step()"], [*TRACEBACK[1:], "", "During handling of the above exception,", "", *TRACEBACK]),
        ([SERVER], [CLOSED, TRAINER, *TRACEBACK]),  # a sign, which no traceback has to follow
        ([SERVER, *WARNED, f"[rank12]:{SERVER}", SERVER[1:]], ["bad file", SERVER]),
        ([], [SERVER, *WARNED]),  # all that there is
        ([], []),
    ],
)
def test_its_lines_begin_with_the_cause(before: list[str], lines: list[str]) -> None:
    assert finish.named_cause(cause(*before, *lines)).last_lines == lines


@pytest.mark.seconds
@pytest.mark.torch
def test_its_lines_begin_with_the_cause_whatever_torch_prints(tmp_path: Path) -> None:
    code = f"from torch._C._distributed_c10d import _WorkerServer\nserver = _WorkerServer({str(tmp_path / 's')!r})\n"
    found = failed(tmp_path, *python(f"{code}raise SystemExit('no such model')"))
    assert "WorkerServer" in (tmp_path / run_folder.rank_log(0)).read_text()
    assert found.last_lines[0] == "no such model"


def test_a_mount_that_went_away_is_try_again() -> None:
    """Whatever the rank ended with: the same again may succeed."""
    why = "killed by SIGBUS; the image is gone: [Errno 107] Transport endpoint is not connected: '/opt/dray/x.py'"
    found = finish.named_cause(Cause(node="n2", rank=1, code=135, why=why, log=None, last_lines=[]))
    assert (found.name, found.code) == ("the image's mount went away", 75)


def test_the_runner_knows_the_same_signs_of_another_s_end() -> None:
    """It reads no causes.toml."""
    (one,) = (one for one in finish.known_causes() if one.name == finish.FOLLOWS)
    assert [sign.lines and sign.lines.pattern for sign in one.sign] == ["|".join(failures.PEER_ENDED)]


def test_a_record_has_the_time_at_which_the_end_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To collect evidence takes a while: a peer of the rank that has died may be the quicker one."""
    clock = iter([10.0, 20.0])
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: next(clock)))
    monkeypatch.setattr(records, "collect_evidence", lambda *_: [f"at {next(clock)}"])
    records.write_failure(str(tmp_path), "node-0", Finding("x", code=1, node="n0"), "log")
    found = json.loads((tmp_path / run_folder.failure("node-0")).read_text())
    assert (found["time"], found["evidence"]) == (10.0, ["at 20.0"])
