"""Collects evidence that is gone soon after a failure: memory, kernel log, disks, torch's message about GPU memory.

Each line goes into the failure's record. It takes some milliseconds, and only after a failure.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from dray.contract import files, node, processes
from dray.contract.findings import RetryError

BEFORE = "DRAY_OOM_KILLS"  # what `oom_kills` was before the launcher was started
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


def collect(folder: str, log: str) -> list[str]:
    """A few lines of evidence; what cannot be read is left out."""
    looks: tuple[Callable[[], list[str]], ...] = (
        lambda: _logged(log),
        _memory,
        _image,
        lambda: _disk("disk of the run folder", folder),
        lambda: _disk(node.SHARED_MEMORY, node.SHARED_MEMORY),
        _kernel,
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


def _killed() -> int | None:
    """How many were killed since the ranks were started; None if unknown."""
    before = os.environ.get(BEFORE, "")
    after = oom_kills()
    return int(after) - int(before) if before and after else None


def _memory() -> list[str]:
    if (killed := _killed() or 0) <= 0:
        return []
    limit = node.memory_limit()
    end = f"; its limit is {limit / 1e9:.3f} GB" if limit else ""
    return [f"memory cgroup: oom_kill rose by {killed} since the ranks were started{end}"]


def require_image() -> None:
    """Raise RetryError if the image's mount is gone, for example by a signal to all processes of the job."""
    for problem in _image():
        raise RetryError(
            "the image's mount has gone away",
            wanted="a mounted image, in which the ranks start again",
            found=problem,
            fix="submit again, or set max_requeues; docs/survive.md says which signals leave the mount alone",
        )


def _image() -> list[str]:
    """The error of a mount that has gone away under the ranks."""
    try:
        os.stat(sys.executable)
    except OSError as error:
        return [f"the image cannot be read any more: {error.strerror}: {sys.executable}"]
    return []


def _disk(name: str, path: str) -> list[str]:
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize / 1e9
    whole = disk.f_blocks * disk.f_frsize / 1e9
    full = ", and no inode is free" if disk.f_files and not disk.f_favail else ""
    return [f"{name}: {free:.3f} GB free of {whole:.3f} GB{full}"]


def _kernel() -> list[str]:
    """Lines about memory, GPUs and disks since this process was started, where this user may read them."""
    buffer = ctypes.create_string_buffer(_KERNEL_LOG)
    ctypes.CDLL(None).klogctl(_READ_ALL, buffer, _KERNEL_LOG)
    began = int(processes.began(os.getpid())) / os.sysconf("SC_CLK_TCK")
    oldest = began - _SOON_S - time.clock_gettime(time.CLOCK_BOOTTIME) * _DRIFT
    kills, of_others = _killed() != 0, re.compile(rf"(?:\buid=|UID:)(?!{os.getuid()}\b)")
    lines = []
    for line in buffer.value.decode("utf-8", "replace").splitlines():
        stamp = _STAMP.match(line)
        sign = _TELLING.search(line[:2000])
        if not stamp or not sign or float(stamp[1]) < oldest:
            continue
        if not _OOM_KILL.match(sign[0]) or (kills and not of_others.search(line)):  # else it was of another job
            lines.append(f"kernel log: {line[line.index('[') :]}")
    return lines[-6:]


def _logged(log: str) -> list[str]:
    """How full the GPU was, and what killed a data worker: torch says more after it than a record's last lines hold."""
    text = files.end(log, _LOG)[0].decode("utf-8", "replace")
    return [f"{name}: {line}" for name, pattern in _LOGGED.items() for line in pattern.findall(text)[-1:]]
