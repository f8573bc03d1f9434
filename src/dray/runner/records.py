"""What a node records in the run folder: its failures and their evidence, its hardware, the ranks' process group.

Evidence is gone soon after a failure: memory, kernel log, disks, torch's message about GPU memory. Each line goes into
the failure's record. It takes some milliseconds, and only after a failure.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dray.contract import failures, files, hardware, node, processes, run_folder
from dray.contract.findings import Finding, RetryError
from dray.runner import heartbeats, redact, say
from dray.runner.plan import Endpoint, Environ, Plan

OOM_KILLS_BEFORE = "DRAY_OOM_KILLS"  # what `oom_kills` was before the launcher was started
_WAIT_S = 5.0  # at most, for all ranks: a program ends with its supervisor, which records how it ended
_LOG, _KERNEL_LOG = 1 << 16, 1 << 18  # bytes from their ends
_SOON_S, _DRIFT = 60.0, 5e-5  # before the start; and of the clock of the kernel's log, which NTP does not set
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL of syslog(2), which dmesg uses too
_STAMP = re.compile(r"(?:<\d{1,4}>)?\[ {0,6}(\d{1,10}\.\d{6})\]")
_TELLING = re.compile(
    r"oom-kill:|out of memory: Killed|NVRM: Xid|NVRM: .{0,80}fallen off|Hardware Error|EDAC .{0,40}\bUE\b"
    r"|: segfault at |amdgpu.{0,120}(?:GPU reset|page fault|RAS|ring .{0,40}timeout)|I/O error"
    r"|nfs: server .{1,80} not responding",
    re.IGNORECASE,
)
_OOM_KILL = re.compile("oom-kill|out of memory", re.IGNORECASE)
_LOGGED = {
    "GPU memory": re.compile(r"[A-Z]{2,4} out of memory\. Tried to allocate.{0,500}"),
    "log": re.compile(r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: .{0,500}"),
}
_ANSWER_S = 5.0  # for the store
# Of the store's protocol, seen the same in torch 2.8, 2.9 and 2.13: TCPStoreBackend.hpp.
_VALIDATE, _GET, _CHECK = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=B", 3), struct.pack("=BQ", 5, 1)
_READY = 0
_COUNT, _ADDRESS = "init/", "/default_pg/0//cpu//0/{}"


def write_failure(folder: str, name: str, found: Finding, log: str, **more: object) -> None:
    """Write failures/NAME.json; a full disk must not hide the exit code as well."""
    fields = {
        "time": time.time(), "node": found.node, "rank": found.rank, "code": found.code, "why": str(found), "log": log,
        "last_lines": files.tail(log), **more,
    }  # fmt: skip
    if "lost" not in more:  # this node tells nothing of another that is gone
        fields["evidence"] = collect_evidence(folder, log)
    put(f"{folder}/{run_folder.failure(name)}", json.dumps(redact.redacted(fields), indent=1))


def first_failure(plan: Plan) -> dict[str, Any] | None:
    """The record of the first failure of this node's ranks, because of which the others failed; None if none has.

    The launcher has ended, and a rank ends with it. One whose supervisor was killed is recorded now.
    """
    records = []
    seen = time.time()
    deadline = time.monotonic() + _WAIT_S
    for rank in plan.ranks:
        path = f"{plan.folder}/{run_folder.failure(f'rank-{rank}')}"
        while (program := _unrecorded(plan, rank, path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if program and not processes.began(program):
            found = Finding("killed by SIGKILL, or its supervisor was", code=137, node=plan.name, rank=rank)
            write_failure(plan.folder, f"rank-{rank}", found, f"{plan.folder}/{run_folder.rank_log(rank)}", time=seen)
        with suppress(OSError, ValueError):  # there is none, or a full disk has cut it short
            records.append(json.loads(files.read(path)))
    first = min((record["time"] for record in records), default=0.0)

    def order(record: Mapping[str, Any]) -> float:
        lines = [record["why"], *record["last_lines"]]
        return failures.cause_order(record["time"], first, lambda: failures.follows_peer(lines))

    return min(records, key=order, default=None)


def _unrecorded(plan: Plan, rank: int, path: str) -> int:
    """The rank's program, if neither its exit code nor a record was written; else 0."""
    return 0 if os.path.exists(path) else max(0, heartbeats.of(plan, rank).program)


def write_node(plan: Plan, environ: Environ) -> None:
    """Write nodes/node-N.json, the node's hardware and software, for the capsule."""
    # cuda12 has cuda's GPUs, rocm6 those of rocm.
    seen = hardware.look(plan.variant.rstrip("0123456789"), environ, packages=plan.me == 0)
    fields = {"node": plan.me, "name": plan.name, **seen}
    put(f"{plan.folder}/{run_folder.node(plan.me)}", json.dumps(fields, indent=1))


def set_aside(plan: Plan, restart: int) -> None:
    """Move this node's records to failures/restart-N: they are the reason for a restart, and did not end the run."""
    target = f"{plan.folder}/{run_folder.restart(restart)}"
    for name in ("hang", f"node-{plan.me}", *(f"rank-{rank}" for rank in plan.ranks)):
        with suppress(OSError):  # there is none, or another node was first
            os.makedirs(target, exist_ok=True)
            os.replace(f"{plan.folder}/{run_folder.failure(name)}", f"{target}/{name}.json")


def write_process_group(folder: str, size: int, store: Endpoint) -> None:
    """Write a file if some ranks have joined a process group, and the largest one is smaller than the world.

    torch counts in the store each rank that joins it with a world size. In a process group with Gloo, which
    `init_process_group()` without a backend makes too, each rank also leaves its address under its number. A rank that
    works alone, or with a store of its own, leaves neither. The ranks notice nothing.
    """
    import socket  # noqa: PLC0415  the supervisor of a rank that died need not wait for it

    if size == 1:
        return
    keys = [_COUNT, *map(_ADDRESS.format, range(size))]
    with (
        suppress(OSError, ValueError, struct.error),  # no store that answers as torch's does: nobody can tell
        socket.create_connection(store, timeout=_ANSWER_S) as line,
        line.makefile("rb") as answers,
    ):
        line.sendall(_VALIDATE + b"".join(_CHECK + _store_text(key) for key in keys))
        counted, *addresses = (answer == _READY for answer in answers.read(len(keys)))
        if not counted:
            return
        line.sendall(_GET + _store_text(_COUNT))
        (length,) = struct.unpack("=Q", answers.read(8))
        # A store that has died leaves its port to others, who may tell any length.
        largest = sum(addresses) or int(answers.read(min(length, 20)))
        if largest < size:
            put(f"{folder}/{run_folder.PROCESS_GROUP}", json.dumps({"largest": largest}))


def _store_text(text: str) -> bytes:
    return struct.pack("=Q", len(text)) + text.encode()


def put(target: str, text: str) -> None:
    """Write a file of the run folder, or print why it cannot be written: no run fails for that."""
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.write_atomic(target, text)
    except OSError as error:
        say(f"{target} cannot be written: {error}")


def collect_evidence(folder: str, log: str) -> list[str]:
    """A few lines of evidence; what cannot be read is left out."""
    looks: tuple[Callable[[], list[str]], ...] = (
        lambda: _log_lines(log),
        _memory_kills,
        _image_error,
        lambda: _disk_space("disk of the run folder", folder),
        lambda: _disk_space(node.SHARED_MEMORY, node.SHARED_MEMORY),
        _kernel_log,
    )
    lines: list[str] = []
    for look in looks:
        with suppress(Exception):  # no defect of this may hide the failure itself
            lines += look()
    return lines


def oom_kills() -> str:
    """How many processes of this node's memory cgroup the kernel has killed; empty if unknown."""
    for controllers, group in re.findall(r"(?m)^\d+:(|memory):(.*)$", node.proc_text("/proc/self/cgroup")):
        counter = "memory{}/memory.oom_control" if controllers else "{}/memory.events"
        for seen in (group, ""):  # its own, or the root that a container sees
            counts = node.proc_text(f"/sys/fs/cgroup/{counter.format(seen)}")
            if count := re.search(r"(?m)^oom_kill (\d+)$", counts):
                return count[1]
    return ""


def _new_oom_kills() -> int | None:
    """How many were killed since the ranks were started; None if unknown."""
    before = os.environ.get(OOM_KILLS_BEFORE, "")
    after = oom_kills()
    return int(after) - int(before) if before and after else None


def _memory_kills() -> list[str]:
    if (killed := _new_oom_kills() or 0) <= 0:
        return []
    limit = node.memory_limit()
    end = f"; its limit is {limit / 1e9:.3f} GB" if limit else ""
    return [f"memory cgroup: oom_kill rose by {killed} since the ranks were started{end}"]


def require_image() -> None:
    """Raise RetryError if the image's mount is gone, for example by a signal to all processes of the job."""
    for problem in _image_error():
        raise RetryError(
            "the image's mount has gone away",
            wanted="a mounted image, in which the ranks start again",
            found=problem,
            fix="submit again, or set max_requeues; docs/survive.md says which signals leave the mount alone",
        )


def _image_error() -> list[str]:
    """The error of a mount that has gone away under the ranks."""
    try:
        os.stat(sys.executable)
    except OSError as error:
        return [f"the image cannot be read any more: {error.strerror}: {sys.executable}"]
    return []


def _disk_space(name: str, path: str) -> list[str]:
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize / 1e9
    whole = disk.f_blocks * disk.f_frsize / 1e9
    full = ", and no inode is free" if disk.f_files and not disk.f_favail else ""
    return [f"{name}: {free:.3f} GB free of {whole:.3f} GB{full}"]


def _kernel_log() -> list[str]:
    """Lines about memory, GPUs and disks since this process was started, where this user may read them."""
    buffer = ctypes.create_string_buffer(_KERNEL_LOG)
    ctypes.CDLL(None).klogctl(_READ_ALL, buffer, _KERNEL_LOG)
    began = int(processes.began(os.getpid())) / os.sysconf("SC_CLK_TCK")
    oldest = began - _SOON_S - time.clock_gettime(time.CLOCK_BOOTTIME) * _DRIFT
    kills, of_others = _new_oom_kills() != 0, re.compile(rf"(?:\buid=|UID:)(?!{os.getuid()}\b)")
    lines = []
    for line in buffer.value.decode("utf-8", "replace").splitlines():
        stamp = _STAMP.match(line)
        sign = _TELLING.search(line[:2000])
        if not stamp or not sign or float(stamp[1]) < oldest:
            continue
        if not _OOM_KILL.match(sign[0]) or (kills and not of_others.search(line)):  # else it was of another job
            lines.append(f"kernel log: {line[line.index('[') :]}")
    return lines[-6:]


def _log_lines(log: str) -> list[str]:
    """How full the GPU was, and what killed a data worker: torch says more after it than a record's last lines hold."""
    text = files.end(log, _LOG)[0].decode("utf-8", "replace")
    return [f"{name}: {line}" for name, pattern in _LOGGED.items() for line in pattern.findall(text)[-1:]]
